"""Builds the prompt of the next turn in one of three ways (`generator.conversation`).

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
from typing import NamedTuple

import numpy as np

from service.handoff.steps.values import StopReason
from service.rollout.chat.chat import Chat, Tool
from service.rollout.engine import Generation, Mode
from service.rollout.environment import Message
from service.types import NO_VERSION, Bools, Float32s, Ids, Int32s, Int64s, Uint16s


class Response(NamedTuple):
    """The response of one turn as columns [T]: the sampled tokens, then an end token if one was appended."""

    token_ids: Int32s
    logprobs: Float32s
    loss_mask: Bools
    """True for sampled tokens."""
    versions: Int64s
    support_size: Uint16s | None = None
    support: Ids | None = None


def as_sampled(generation: Generation) -> Response:
    """The response with exactly the tokens that the policy sampled."""
    mask = np.ones(len(generation.token_ids), np.bool_)
    support = generation.support_size, generation.support
    return Response(generation.token_ids, generation.logprobs, mask, generation.versions, *support)


def without_loss(response: Response) -> Response:
    """A copy of the response in which no token carries loss, for a turn that the policy did not sample."""
    none = np.full_like(response.versions, NO_VERSION)
    return response._replace(
        loss_mask=np.zeros_like(response.loss_mask), versions=none, support_size=None, support=None
    )


def with_end(generation: Generation, chat: Chat, last: bool = False) -> Response:
    """The response, with an end token appended if it needs one. It needs none if the policy sampled an end token, or if
    the first token of the next message ends the turn; but a response has at least one token. `last`: whether no message
    follows."""
    response = as_sampled(generation)
    if generation.sampled_end or (chat.closing_id is None and not last and len(generation.token_ids)):
        return response
    return Response(
        np.append(response.token_ids, np.int32(chat.end_id)),
        np.append(response.logprobs, np.float32(0.0)),
        np.append(response.loss_mask, False),
        np.append(response.versions, np.int64(NO_VERSION)),
        None if response.support_size is None else np.append(response.support_size, np.uint16(0)),
        response.support,
    )


def generation_of(text: str, chat: Chat, most: int | None = None) -> Generation:
    """A text of another model or a person, encoded as if an engine had sampled it. It has at most `most` tokens,
    log-probabilities 0 and no policy version."""
    token_ids = chat.answer(text)
    kept = token_ids[:most]
    return Generation(
        kept,
        np.zeros(len(kept), np.float32),
        np.full(len(kept), NO_VERSION, np.int64),
        StopReason.STOP if len(kept) == len(token_ids) else StopReason.LENGTH,
        sampled_end=False,
    )


class Prompt(NamedTuple):
    """The tokens of the next turn's prompt: the whole prompt, or only the tokens after the previous prompt and
    response."""

    token_ids: Int32s
    whole: bool
    """True if the tokens are the whole prompt; False if they are only the tokens after the previous prompt and
    response."""


class Conversation:
    """The conversation of one role in one trajectory: builds the role's prompts, and the responses to them."""

    def __init__(self, mode: Mode, chat: Chat) -> None:
        self._mode, self._chat = mode, chat
        self.messages: list[Message] = []
        """The conversation without the role's last response."""
        self.last_response: tuple[str, Int32s] | None = None
        """Text and tokens of the role's last response."""

    def prompt(
        self, messages: Sequence[Message], history: Sequence[Message] | None = None, tools: Sequence[Tool] = ()
    ) -> Prompt:
        """The role's next prompt. `messages` are added to the conversation; or `history`, if given, replaces the
        conversation."""
        if history is not None or self.last_response is None:
            self.messages = list(messages if history is None else history)
            return Prompt(self._chat.prompt(self.messages, tools), whole=True)
        text, response_ids = self.last_response
        self.messages += [Message(role="assistant", content=text), *messages]
        match self._mode:
            case "append":
                return Prompt(self._chat.delta(messages, int(response_ids[-1])), whole=False)
            case "rerender":
                return Prompt(self._chat.prompt(self.messages, tools), whole=True)
            case "inline":
                told = "".join(message["content"] for message in messages)
                return Prompt(self._chat.plain(told, continues=True), whole=False)

    def close(self, text: str, generation: Generation, last: bool) -> Response:
        """The response to the last prompt, with an end token appended as in `with_end`. `last`: whether no turn
        follows.

        In the mode `inline` the message continues after each response but the last. So only the last response, or an
        empty response, gets an end token.
        """
        continues = self._mode == "inline" and not last and len(generation.token_ids)  # a step has at least one token
        response = as_sampled(generation) if continues else with_end(generation, self._chat, last)
        self.last_response = text, response.token_ids
        return response
