"""Makes the supervised rows of `baton sft` and of the warm start: the tokens that the agent loop would have built.

The loss mask is True for the texts of the assistant and their end tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Conversation, Mode, generation_of
from service.rollout.environment import Message
from service.types import Int32s, SupervisedRow

EMPTY = SupervisedRow(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_))


def rows_with_loss_mask(chat: Chat, mode: Mode, conversations: Sequence[Sequence[Message]]) -> list[SupervisedRow]:
    """The supervised rows of all conversations, in order. A conversation gives one row, or several rows if the prompt
    of one of its turns rewrites the history."""
    return [row for messages in conversations for row in _rows(chat, mode, list(_turns(messages)))]


def _turns(messages: Sequence[Message]) -> Iterator[tuple[list[Message], str]]:
    """Each text of the assistant, with the messages before it."""
    before: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            yield before, message["content"]
            before = []
        else:
            before.append(message)


def _rows(chat: Chat, mode: Mode, turns: Sequence[tuple[list[Message], str]]) -> Iterator[SupervisedRow]:
    conversation, row = Conversation(mode, chat), EMPTY
    for number, (messages, text) in enumerate(turns, start=1):
        prompt = conversation.prompt(messages)
        length = len(row.token_ids)
        if prompt.whole and not np.array_equal(prompt.token_ids[:length], row.token_ids):
            yield row
            row, length = EMPTY, 0
        prompt_ids = prompt.token_ids[length:] if prompt.whole else prompt.token_ids
        response = conversation.close(text, generation_of(text, chat), last=number == len(turns))
        row = _with(_with(row, prompt_ids, trained=False), response.token_ids, trained=True)
    yield row


def _with(row: SupervisedRow, token_ids: Int32s, trained: bool) -> SupervisedRow:
    mask = np.full(len(token_ids), trained, dtype=np.bool_)
    return SupervisedRow(np.concatenate([row.token_ids, token_ids]), np.concatenate([row.loss_mask, mask]))
