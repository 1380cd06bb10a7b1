"""The interface of all dialects (HTTP APIs). A dialect reads a request as a `CallRequest`, and writes a `CallAnswer` as
the answer.

body of a POST --read--> CallRequest --(tree, engine, journal)--> CallAnswer --reply / events--> JSON / event stream
                   \\--> Refused --error / error_event--> the dialect's own form of an error
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from service.agents.conversation_tree import AgentCall
from service.errors import UserError
from service.rollout.chat.chat import Tool
from service.types import Int32s

LEAST = -9999.0
"""The log-probability that OpenAI and vLLM give for an impossible token."""
MODEL = "policy"
"""The name of the only model; requests may name any model."""
DONE = b"data: [DONE]\n\n"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class CallRequest(NamedTuple):
    """One request of a client."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the form of chat completions, as `ConversationTree.open` takes them; empty if there is a `prompt`."""
    model: str = MODEL
    """The name of the model in the request; the answer repeats it."""
    tools: Sequence[Tool] = ()
    echoed: frozenset[str] = frozenset()
    """Names of calls that the client sent back, as signatures or encrypted content."""
    stream: bool = False
    max_tokens: int | None = None
    """Maximum tokens of the answer; None: as many as fit."""
    truncation: Mapping[str, Any] = {}
    """The sampler's `top_p`, `top_k` and `min_p`, if the request has them."""
    begun: str = ""
    """The beginning of the answer, which the client wrote; the policy continues it."""
    prompt: Int32s | None = None
    """[Q] token ids in place of messages (only in `generate`)."""
    wants_ids: bool = False
    """Whether the client asked for `return_token_ids`: the answer then has ids, log-probabilities and versions."""
    wants_logprobs: bool = False
    """Whether the client asked for log-probabilities without ids."""
    names_ids: bool = False
    """Whether log-probabilities name tokens by id, not by text (vLLM's `return_tokens_as_token_ids`)."""
    continues: str = ""
    """Name of the call that the request continues; empty: the messages select the call."""
    include_usage: bool = False
    """Whether a stream of chat completions ends with token counts."""
    repeated: Mapping[str, Any] = {}
    """Fields of the request that the dialect's answer repeats."""
    n: int = 1
    """Number of samples that the client asks for."""
    may_call: bool = True
    """Whether tool calls in the answer are parsed; if false, they stay text."""
    forms: tuple[str, ...] = ()
    """Fields of the request that prescribe the form of the answer."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that have no effect."""


class CallAnswer(NamedTuple):
    """One call of the policy, with the data for the client's answer."""

    call: AgentCall
    created: int
    """Time of the answer, in seconds since 1970."""
    pieces: Sequence[bytes] = ()
    """The bytes of each sampled token's text; empty if the client did not ask for log-probabilities."""
    others: Sequence[CallAnswer] = ()
    """Further samples of the same request."""

    @property
    def all(self) -> Sequence[CallAnswer]:
        """Every sample of the request."""
        return self, *self.others

    @property
    def finish(self) -> Literal["stop", "length", "tool_calls"]:
        """The finish reason of the answer, in the words of chat completions."""
        return "tool_calls" if self.call.reply.calls else "length" if self.call.stop_reason == "length" else "stop"

    @property
    def usage(self) -> dict[str, int]:
        """The token counts in the form of chat completions."""
        n_prompt, n_sampled = self.call.n_prompt, sum(one.call.n_sampled for one in self.all)
        return {"prompt_tokens": n_prompt, "completion_tokens": n_sampled, "total_tokens": n_prompt + n_sampled}

    @property
    def prompt_ids(self) -> list[int]:
        """The ids of the whole prompt."""
        ids: list[int] = self.call.token_ids()[: self.call.n_prompt].tolist()
        return ids

    def sampled(self) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of the tokens that the policy sampled, without an appended end token. `LEAST`
        replaces a log-probability that is not finite, because JSON has no NaN."""
        response, sampled = self.call.response, self.call.response.loss_mask
        logprobs = response.logprobs[sampled]
        return response.token_ids[sampled].tolist(), np.where(np.isfinite(logprobs), logprobs, LEAST).tolist()


class Refused(UserError):
    """Refusal of a request; the client gets it as an error in the form of its dialect."""

    def __init__(self, status: int, field: str | None, reason: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.status = status
        """The HTTP status."""
        self.field = field
        """The path of the wrong field, such as `messages[2].content`."""
        self.reason = reason
        self.code = code
        """An error code for programs, for instance `context_length_exceeded`."""


def frame(data: Any, event: str = "") -> bytes:
    """Encode one server-sent event; `data` becomes JSON without line breaks."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def openai_error(refused: Refused) -> dict[str, Any]:
    """The body of an error, in OpenAI's form, which all dialects except `messages` use."""
    kind = "server_error" if refused.status >= 500 else ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.field, "code": refused.code}}


def openai_error_event(refused: Refused) -> bytes:
    """The error event that ends a failed stream of chat completions."""
    return frame(openai_error(refused)) + DONE


class Dialect(NamedTuple):
    """One API: the functions that read its requests and write its answers."""

    name: str
    read: Callable[[Mapping[str, Any]], CallRequest]
    """Reads the JSON object that a client sent; raises `Refused` with status 400 and the wrong field."""
    reply: Callable[[CallAnswer, CallRequest], dict[str, Any]]
    """The whole answer as one JSON value."""
    events: Callable[[CallAnswer, CallRequest], Iterator[bytes]]
    """The answer as complete frames of server-sent events."""
    error: Callable[[Refused], dict[str, Any]] = openai_error
    """The body of an answer with status 4xx or 5xx."""
    error_event: Callable[[Refused], bytes] = openai_error_event
    """The frames that end a stream whose headers were sent."""
