"""What every dialect reads a request into, and what it writes an answer from.

body of a POST --read--> Asked --(tree, engine, journal)--> Answer --reply / events--> JSON / server-sent events
                   \\--> Refused --error / error_event--> the dialect's own form of an error
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from service.agents.conversation_tree import Call
from service.errors import UserError
from service.rollout.chat.chat import Tool
from service.types import Int32s

Finish = Literal["stop", "length", "tool_calls"]


class Asked(NamedTuple):
    """One request of a client."""

    messages: Sequence[Mapping[str, Any]]
    """In the form of chat completions, as `ConversationTree.open` takes them; empty where `prompt` is given."""
    tools: Sequence[Tool] = ()
    echoed: frozenset[str] = frozenset()
    """Names of calls that came back as a signature or as encrypted content."""
    stream: bool = False
    max_tokens: int | None = None
    """Tokens of the answer at most; None: as many as fit."""
    ignored: tuple[str, ...] = ()
    """Names of fields that change nothing: pinned sampling, what no policy here offers, and unknown ones."""
    prompt: str | Int32s | None = None
    """Text or [P] ids that stand for the messages (completions only)."""
    wants_ids: bool = False
    """The client asked for `return_token_ids`: the answer has the ids, log-probabilities and versions."""
    include_usage: bool = False
    """A stream of chat completions or completions ends with the numbers of tokens."""
    repeated: Mapping[str, Any] = MappingProxyType({})
    """Fields of the request that the dialect's answer has too."""


class Answer(NamedTuple):
    """One call of the policy for the client that asked."""

    call: Call
    model: str
    created: int
    """Seconds since 1970."""
    prompt_tokens: int
    finish: Finish
    weight_versions: tuple[int, ...]
    """[T] policy version of each token of the response."""


class Refused(UserError):
    """A request that is not answered as asked; a client gets it as an error in the form of its dialect."""

    def __init__(self, status: int, field: str | None, reason: str, code: str | None = None) -> None:
        super().__init__(f"{field}: {reason}" if field else reason)
        self.status = status
        """The HTTP status."""
        self.field = field
        """The request's field at fault, with its place: `messages[2].content`."""
        self.reason = reason
        self.code = code
        """What programs can test, for instance `context_length_exceeded`."""


class Dialect(Protocol):
    """One form of requests and answers."""

    name: str

    def read(self, body: Mapping[str, Any]) -> Asked:
        """The request in the JSON object that a client sent.

        Raises:
            Refused: with status 400 and the field at fault.
        """

    def reply(self, answer: Answer, asked: Asked) -> dict[str, Any]:
        """The whole answer as one JSON value."""

    def events(self, answer: Answer, asked: Asked) -> Iterator[bytes]:
        """The answer as frames of server-sent events, each whole."""

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an answer with status 4xx or 5xx."""

    def error_event(self, refused: Refused) -> bytes:
        """The frames that end a stream whose headers were sent."""
