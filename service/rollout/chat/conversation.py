"""How one turn follows another: three ways to make the next prompt.

append     the history stays as it is; the turn's end, the observation as a message and the next opening follow it
rerender   the whole conversation goes through the chat template anew, which may strip or rewrite earlier turns
inline     one assistant's message holds everything: the observation's bare text follows the response

    append    ... <im_start> asst look fox <im_end> | <im_start> user 17 <im_end> <im_start> asst | answer 17 <im_end>
    inline    ... <im_start> asst look fox | 17 | answer 17 <im_end>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from service.rollout.chat.chat import Chat, Tool
from service.rollout.engine import Generation
from service.rollout.environment import Message
from service.types import Int32s

Mode = Literal["append", "rerender", "inline"]


class Prompt(NamedTuple):
    """What the policy reads next."""

    token_ids: Int32s
    whole: bool
    """True: this is the whole prompt. False: it follows the previous prompt and response."""


class Conversation(Protocol):
    """The messages of one trajectory on their way to tokens."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The first prompt, or a new beginning where the environment rewrote the history."""

    def close(self, generation: Generation, last: bool) -> Int32s:
        """The response, with an end appended where the mode wants one and the policy sampled none."""

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """The prompt after the response and the environment's messages."""


class AppendOnly:
    """Every turn is a message, and the history never changes."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The first prompt."""
        return Prompt(self._chat.prompt(messages, tools), whole=True)

    def close(self, generation: Generation, last: bool) -> Int32s:
        """The response, closed."""
        return with_end(generation, self._chat.end_id)

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """What stands between the response and the next one."""
        return Prompt(self._chat.delta(messages, int(response_ids[-1])), whole=False)


class Rerendered(AppendOnly):
    """Every prompt is the template's view of the whole conversation; where that rewrites an earlier turn, rows fork."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._messages: list[Message] = []
        self._tools: Sequence[Tool] = ()

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The first prompt."""
        self._messages, self._tools = list(messages), tools
        return super().begin(messages, tools)

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """The whole conversation, rendered anew."""
        self._messages += [Message(role="assistant", content=text), *messages]
        return super().begin(self._messages, self._tools)


class Inline(AppendOnly):
    """One message of the assistant, in which observations stand between what it says."""

    def close(self, generation: Generation, last: bool) -> Int32s:
        """The response; only the last one is closed, for after the others the message goes on."""
        if last or not len(generation.token_ids):  # a step without any token could not be told from a lost one
            return with_end(generation, self._chat.end_id)
        return generation.token_ids

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """The observations' bare text."""
        return Prompt(self._chat.plain("".join(message["content"] for message in messages)), whole=False)


def conversation(mode: Mode, chat: Chat) -> Conversation:
    """A conversation of that mode, for one trajectory."""
    match mode:
        case "append":
            return AppendOnly(chat)
        case "rerender":
            return Rerendered(chat)
        case "inline":
            return Inline(chat)


def with_end(generation: Generation, end_id: int) -> Int32s:
    """The response; an end is appended where the policy stopped without one, so that the turn is closed."""
    if generation.sampled_end:
        return generation.token_ids
    return np.append(generation.token_ids, np.int32(end_id))
