"""Supervised rows from demonstrations, with exactly the tokens that the agent loop would have built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Mode, conversation
from service.rollout.engine import Generation
from service.rollout.environment import Message
from service.types import NO_VERSION, Int32s, SupervisedRow


class _Turn(NamedTuple):
    """One message of the assistant, and the messages before it."""

    messages: list[Message]
    text: str


EMPTY = SupervisedRow(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_))


def demonstration_rows(chat: Chat, mode: Mode, demonstrations: Sequence[Sequence[Message]]) -> list[SupervisedRow]:
    """One row per demonstration, in order; several rows if a turn's prompt rewrites the history."""
    return [row for messages in demonstrations for row in _rows(chat, mode, list(_turns(messages)))]


def _turns(messages: Sequence[Message]) -> Iterator[_Turn]:
    before: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            yield _Turn(before, message["content"])
            before = []
        else:
            before.append(message)


def _rows(chat: Chat, mode: Mode, turns: Sequence[_Turn]) -> Iterator[SupervisedRow]:
    rendered, row = conversation(mode, chat), EMPTY
    text, response = "", EMPTY.token_ids
    for number, turn in enumerate(turns):
        prompt = rendered.follow(text, response, turn.messages) if number else rendered.begin(turn.messages)
        length = len(row.token_ids)
        if prompt.whole and not np.array_equal(prompt.token_ids[:length], row.token_ids):
            yield row
            row, length = EMPTY, 0
        prompt_ids = prompt.token_ids[length:] if prompt.whole else prompt.token_ids
        text, last = turn.text, number == len(turns) - 1
        response = rendered.close(_generation(chat.plain(text)), last).token_ids
        row = _with(_with(row, prompt_ids, trained=False), response, trained=True)
    yield row


def _with(row: SupervisedRow, token_ids: Int32s, trained: bool) -> SupervisedRow:
    mask = np.full(len(token_ids), trained, dtype=np.bool_)
    return SupervisedRow(np.concatenate([row.token_ids, token_ids]), np.concatenate([row.loss_mask, mask]))


def _generation(token_ids: Int32s) -> Generation:
    """The assistant's text as a generation without an end token."""
    logprobs, versions = np.zeros(len(token_ids), np.float32), np.full(len(token_ids), NO_VERSION, np.int64)
    return Generation(token_ids, logprobs, versions, "stop", sampled_end=False)
