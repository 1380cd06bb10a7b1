"""From demonstrations to supervised rows: the same tokens that the agent loop would have built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Mode, conversation
from service.rollout.engine import Generation
from service.rollout.environment import Message
from service.types import NO_VERSION, Bools, Int32s


class SupervisedRow(NamedTuple):
    """One demonstration, or a part of it; the mask is True on what an assistant said, its ends included."""

    token_ids: Int32s
    loss_mask: Bools


class _Turn(NamedTuple):
    """What is read, and what is said to it."""

    read: list[Message]
    said: str


def demonstration_rows(chat: Chat, mode: Mode, demonstrations: Sequence[Sequence[Message]]) -> list[SupervisedRow]:
    """The rows in the order given; a demonstration has several where a turn's prompt rewrites the history."""
    return [row for messages in demonstrations for row in _rows(chat, mode, list(_turns(messages)))]


def _turns(messages: Sequence[Message]) -> Iterator[_Turn]:
    read: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            yield _Turn(read, message["content"])
            read = []
        else:
            read.append(message)


def _rows(chat: Chat, mode: Mode, turns: Sequence[_Turn]) -> Iterator[SupervisedRow]:
    talk, row = conversation(mode, chat), _nothing()
    said, response = "", row.token_ids
    for number, turn in enumerate(turns):
        prompt = talk.follow(said, response, turn.read) if number else talk.begin(turn.read)
        length = len(row.token_ids)
        if prompt.whole and not np.array_equal(prompt.token_ids[:length], row.token_ids):
            yield row
            row, length = _nothing(), 0
        opening = prompt.token_ids[length:] if prompt.whole else prompt.token_ids
        said, response = turn.said, talk.close(_unclosed(chat.plain(turn.said)), last=number == len(turns) - 1)
        row = _with(_with(row, opening, False), response, True)
    yield row


def _nothing() -> SupervisedRow:
    return SupervisedRow(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_))


def _with(row: SupervisedRow, token_ids: Int32s, said: bool) -> SupervisedRow:
    mask = np.full(len(token_ids), said, dtype=np.bool_)
    return SupervisedRow(np.concatenate([row.token_ids, token_ids]), np.concatenate([row.loss_mask, mask]))


def _unclosed(token_ids: Int32s) -> Generation:
    return Generation(
        token_ids,
        np.zeros(len(token_ids), np.float32),
        np.full(len(token_ids), NO_VERSION, np.int64),
        "stop",
        sampled_end=False,
    )
