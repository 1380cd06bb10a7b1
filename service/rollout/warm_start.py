"""From demonstrations to supervised rows: the same tokens that the agent loop would have built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from service.rollout.chat import Chat
from service.rollout.environment import Message
from service.types import Bools, Int32s


class SupervisedRow(NamedTuple):
    """One demonstration; the mask is True on what an assistant said, its ends included."""

    token_ids: Int32s
    loss_mask: Bools


def demonstration_rows(chat: Chat, demonstrations: Sequence[Sequence[Message]]) -> list[SupervisedRow]:
    """One row a demonstration, in the order given."""
    return [_row(chat, messages) for messages in demonstrations]


def _row(chat: Chat, messages: Sequence[Message]) -> SupervisedRow:
    parts: list[tuple[Int32s, bool]] = []
    waiting: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        opening = chat.delta(waiting, chat.end_id) if parts else chat.prompt(waiting)
        response = np.append(chat.encode(message["content"]), np.int32(chat.end_id))
        parts += [(opening, False), (response, True)]
        waiting = []
    return SupervisedRow(
        np.concatenate([ids for ids, _ in parts]),
        np.concatenate([np.full(len(ids), said, dtype=np.bool_) for ids, said in parts]),
    )
