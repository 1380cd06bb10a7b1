"""Makes supervised rows from conversations: for `baton sft`, from JSONL or parquet, and for the warm start. A row has
the tokens that the agent loop would have built. Its loss mask is True for the assistant's texts and their end tokens.

    {"messages": [{"role": "user", "content": "2 + 3 ?"}, {"role": "assistant", "content": "5"}]}

Other columns of a row are not read. A message may have no other fields than role and content, unless they are null:
they would change the tokens that are learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from service.errors import UserError
from service.rollout.chat.chat import Chat, MessagesRefused
from service.rollout.chat.conversation import Conversation, generation_of
from service.rollout.engine import Mode
from service.rollout.environment import Message
from service.rollout.prompts.rows import messages_of, read_rows, row_place
from service.types import SupervisedRow

FORM = 'a row is {"messages": [{"role": "system, user, assistant or tool", "content": "a text"}, ...]}'


class _LearnedMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class _ConversationRow(msgspec.Struct):
    messages: Annotated[list[_LearnedMessage], msgspec.Meta(min_length=2)]
    tools: None = None


def conversation_rows(path: Path, chat: Chat, mode: Mode, longest: int) -> list[SupervisedRow]:
    """The supervised rows of every conversation in a file, in order.

    Raises:
        UserError: the file or a row is malformed, or has more than `longest` tokens; the message names file and row.
    """
    rows = []
    for number, columns in enumerate(read_rows(path)):
        try:
            shown = rows_with_loss_mask(chat, mode, [_messages(columns)])
        except (MessagesRefused, ValueError) as error:
            raise UserError(f"{row_place(path, number)}: {error}") from error
        tokens = max(len(row.token_ids) for row in shown)
        if tokens > longest:
            raise UserError(
                f"{row_place(path, number)}: {tokens} tokens, but a row may have {longest} "
                "(generator.max_input_length + generator.max_generate_length); raise these, or shorten the conversation"
            )
        rows += shown
    if not rows:
        raise UserError(f"dataset {path}: there are no rows; give at least one conversation")
    return rows


def unknown_note(rows: Sequence[SupervisedRow], chat: Chat) -> str | None:
    """A warning if a token that would be learned is the tokenizer's token for unknown characters; None if no token
    is."""
    learned = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    if chat.unknown_id is None or not (unknown := int((learned == chat.unknown_id).sum())):
        return None
    name = chat.text(np.array([chat.unknown_id], np.int32), with_special=True)
    return f"{unknown} of {len(learned)} learned tokens are {name}: the tokenizer lacks characters of the answers"


def _messages(columns: Any) -> list[Message]:
    """The messages of a row; raises `ValueError` with what is wrong."""
    if isinstance(columns, dict) and "messages" in columns:
        columns |= {"messages": messages_of(columns["messages"])}
    try:
        row = msgspec.convert(columns, _ConversationRow)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; {FORM}") from error
    roles = [message.role for message in row.messages]
    if "assistant" not in roles:
        raise ValueError("no message is the assistant's, so there is nothing to learn")
    if roles[0] == "assistant" or ("assistant", "assistant") in pairwise(roles):
        raise ValueError("each message of the assistant must follow a message of another role")
    return [Message(role=message.role, content=message.content) for message in row.messages]


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
    conversation, ids, mask = Conversation(mode, chat), list[int](), list[bool]()
    for number, (messages, text) in enumerate(turns, start=1):
        prompt = conversation.prompt(messages)
        prompt_ids = prompt.token_ids.tolist()
        if prompt.whole and prompt_ids[: len(ids)] != ids:
            yield SupervisedRow(np.array(ids, np.int32), np.array(mask, np.bool_))
            ids, mask = [], []
        added = prompt_ids[len(ids) :] if prompt.whole else prompt_ids
        response_ids = conversation.close(text, generation_of(text, chat), last=number == len(turns)).token_ids.tolist()
        # With some templates the first token of the next message ends a turn: then this token is learned too.
        is_end = bool(ids) and chat.closing_id is None and mode != "inline"
        ids += [*added, *response_ids]
        mask += [is_end and not index for index in range(len(added))] + [True] * len(response_ids)
    yield SupervisedRow(np.array(ids, np.int32), np.array(mask, np.bool_))
