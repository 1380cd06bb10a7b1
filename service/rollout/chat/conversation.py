"""Three ways to build the next turn's prompt (`generator.conversation`).

append     the history stays unchanged; the observation follows as a message
rerender   the chat template renders the whole conversation again, and may strip or rewrite earlier turns
inline     all turns form one assistant message; the observation's plain text follows the response

    append    ... <im_start> asst look fox <im_end> | <im_start> user 17 <im_end> <im_start> asst | answer 17 <im_end>
    inline    ... <im_start> asst look fox | 17 | answer 17 <im_end>

If the policy ended a turn without the end token, that token is appended, and carries no loss:

sampled       appended         columns of the response
look fox      <|im_end|>       token_ids   [look fox <|im_end|>]
                               logprobs    [ -.1 -.4      0    ]
                               loss_mask   [   1   1      0    ]
                               versions    [   7   7     -1    ]   (NO_VERSION)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from service.rollout.chat.chat import Chat, Tool
from service.rollout.engine import Generation
from service.rollout.environment import Message
from service.types import NO_VERSION, Bools, Float32s, Int32s, Int64s

Mode = Literal["append", "rerender", "inline"]


class Response(NamedTuple):
    """The response of one turn as columns [T]: the sampled tokens, and an appended end token if there is one."""

    token_ids: Int32s
    logprobs: Float32s
    loss_mask: Bools
    """True for sampled tokens."""
    versions: Int64s


def as_sampled(generation: Generation) -> Response:
    """The response exactly as the policy sampled it."""
    mask = np.ones(len(generation.token_ids), np.bool_)
    return Response(generation.token_ids, generation.logprobs, mask, generation.versions)


def without_loss(response: Response) -> Response:
    """The response with no loss on its tokens, because they are not the policy's own samples."""
    none = np.full_like(response.versions, NO_VERSION)
    return response._replace(loss_mask=np.zeros_like(response.loss_mask), versions=none)


def with_end(generation: Generation, end_id: int) -> Response:
    """The response, with `end_id` appended unless the policy sampled an end itself."""
    response = as_sampled(generation)
    if generation.sampled_end:
        return response
    return Response(
        np.append(response.token_ids, np.int32(end_id)),
        np.append(response.logprobs, np.float32(0.0)),
        np.append(response.loss_mask, False),
        np.append(response.versions, np.int64(NO_VERSION)),
    )


class Prompt(NamedTuple):
    """The next prompt, or its new part."""

    token_ids: Int32s
    whole: bool
    """True: the whole prompt. False: only the tokens after the previous prompt and response."""


class Conversation:
    """Renders the messages of one trajectory as prompts; mode `append`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The first prompt, or a new whole prompt after the environment rewrote the history."""
        return Prompt(self._chat.prompt(messages, tools), whole=True)

    def close(self, generation: Generation, last: bool) -> Response:
        """The response, with an end token appended if the mode needs one and the policy sampled none."""
        return with_end(generation, self._chat.end_id)

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """The tokens after the response: the environment's messages and the opening of the next turn."""
        return Prompt(self._chat.delta(messages, int(response_ids[-1])), whole=False)

    def after(self, text: str, messages: Sequence[Message]) -> list[Message] | None:
        """The whole conversation if the next prompt is rendered from it; None if the prompt only appends tokens."""
        return None


class Rerendered(Conversation):
    """Every prompt renders the whole conversation; a new row begins if the template rewrites an earlier turn."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat)
        self._messages: list[Message] = []
        self._tools: Sequence[Tool] = ()

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The first prompt."""
        self._messages, self._tools = list(messages), tools
        return super().begin(messages, tools)

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """The whole conversation, rendered again."""
        self._messages = self.after(text, messages)
        return super().begin(self._messages, self._tools)

    def after(self, text: str, messages: Sequence[Message]) -> list[Message]:
        """The whole conversation after a response and the environment's messages."""
        return [*self._messages, Message(role="assistant", content=text), *messages]


class Inline(Conversation):
    """One assistant message, which holds all responses and the observations between them."""

    def close(self, generation: Generation, last: bool) -> Response:
        """The response; only the last one gets an end token, because the message continues after the others."""
        if last or not len(generation.token_ids):  # a step must have at least one token
            return with_end(generation, self._chat.end_id)
        return as_sampled(generation)

    def follow(self, text: str, response_ids: Int32s, messages: Sequence[Message]) -> Prompt:
        """The plain text of the observations as tokens."""
        return Prompt(self._chat.plain("".join(message["content"] for message in messages)), whole=False)


def conversation(mode: Mode, chat: Chat) -> Conversation:
    """A new conversation of this mode, for one trajectory."""
    match mode:
        case "append":
            return Conversation(chat)
        case "rerender":
            return Rerendered(chat)
        case "inline":
            return Inline(chat)
