"""The calls of one agent as a tree: a call that continues another one has its tokens in front, exactly as sampled.

    call 0   user: age of fox?                                  prompt  P            sampled  A
    call 1   user, assistant A, tool: 17                        prompt  P A t        sampled  B
    call 2   user, assistant A, tool: 18   (another branch)     prompt  P A u        sampled  C
    call 3   user, assistant A changed, tool: 17                prompt  Q            (a root: rendered as a whole)

`t` and `u` are what the chat template puts between. A client sends back messages, never tokens; they only select the
parent. Its tokens count: a response is never tokenised again, so tokens and log-probabilities stay those of the engine.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from service.agents.messages import digests, echoed_ids, extended, read_messages
from service.agents.parser import Reply, ReplyParser
from service.rollout.chat.chat import Chat, Tool
from service.rollout.chat.conversation import Conversation
from service.rollout.end_token import Response
from service.rollout.engine import Generation
from service.rollout.environment import Message
from service.types import Int32s

How = Literal["root", "appended", "rerendered"]
"""A new conversation, a continuation of sampled tokens, or one with answers of which no call has the tokens."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of the policy in the tree."""

    name: str
    """An id that a client may send back, for instance as the signature of the thinking."""
    parent: Call | None
    how: How
    carried_ids: Int32s
    """[P] tokens of the prompt after those of the parent; without a parent the whole prompt."""
    response: Response
    reply: Reply
    body: str
    """What identifies the client's request."""
    delivered: bool = False
    """True where the client has the reply, as far as the server can tell."""

    @property
    def ids(self) -> list[str]:
        """The ids of the reply's tool calls."""
        return [f"call_{self.name}_{number}" for number in range(len(self.reply.calls))]

    def path(self) -> Iterator[Call]:
        """This call, its parent, and so on up to the root."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent

    def token_ids(self) -> Int32s:
        """[P + T] ids of the whole prompt and of the response."""
        parts = [part for call in self.path() for part in (call.response.token_ids, call.carried_ids)]
        return np.concatenate(parts[::-1])

    def message(self) -> dict[str, Any]:
        """The reply as the assistant's message of chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.reply.content}
        if self.reply.thinking:
            message["reasoning_content"] = self.reply.thinking
        if self.reply.calls:
            message["tool_calls"] = [
                {"id": of, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for of, (name, arguments) in zip(self.ids, self.reply.calls, strict=True)
            ]
        return message


class Opened(NamedTuple):
    """A call that can be sampled."""

    parent: Call | None
    how: How
    carried_ids: Int32s
    prompt_ids: Int32s
    """[P] ids of the whole prompt."""
    digest: bytes
    """What identifies the conversation up to here."""


class ConversationTree:
    """All calls of one agent, with the tokens of each."""

    def __init__(
        self, chat: Chat, parser: ReplyParser, new_name: Callable[[], str] = lambda: secrets.token_hex(12)
    ) -> None:
        self._chat = chat
        self._renderer = Conversation(chat)
        self._parser = parser
        self._new_name = new_name
        self.calls: list[Call] = []
        self._after: defaultdict[bytes, list[Call]] = defaultdict(list)
        """Calls by the conversation that ends with their reply."""
        self._newest_of: dict[str, Call] = {}
        """The newest call of each request's body."""

    def open(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] = (), echoed: Collection[str] = ()
    ) -> Opened:
        """The prompt of a client's request: the longest continuation of an earlier call, else the whole conversation.

        Among calls of equal content the one counts whose ids the client sent back, in calls or as `echoed` names.

        Raises:
            MessagesRefused: a message cannot be read, or the chat template refuses it.
        """
        read = read_messages(messages)
        said = _without_leading_system(read)
        digest_of = digests(said, tools)
        for length in range(len(said), 0, -1):
            if found := self._after.get(digest_of[length]):
                if any(message["role"] == "assistant" for message in said[length:]):
                    break
                return self._continue(_best(found, {*echoed, *echoed_ids(messages)}), said[length:], digest_of[-1])
        how: How = "rerendered" if any(message["role"] == "assistant" for message in said) else "root"
        prompt_ids = self._renderer.begin(read, tools).token_ids
        return Opened(None, how, prompt_ids, prompt_ids, digest_of[-1])

    def add(self, opened: Opened, generation: Generation, body: str) -> Call:
        """The call with what the engine sampled for it; an end token is appended where the policy sampled none."""
        reply = self._parser.parse(self._chat.text(generation.token_ids))
        response = self._renderer.close(generation, last=False)
        call = Call(self._new_name(), opened.parent, opened.how, opened.carried_ids, response, reply, body)
        (message,) = read_messages([call.message()])
        self.calls.append(call)
        self._after[extended(opened.digest, message)].append(call)
        self._newest_of[body] = call
        return call

    def replayed(self, body: str, is_retry: bool = False) -> Call | None:
        """The call to answer a repeated request with; None where the policy has to be asked.

        Some clients mark no retry, so an equal body repeats a call whose reply was not delivered. After the delivery an
        equal body asks for another sample.
        """
        call = self._newest_of.get(body)
        return call if call is not None and (is_retry or not call.delivered) else None

    def _continue(self, parent: Call, messages: Sequence[Message], digest: bytes) -> Opened:
        carried = self._renderer.follow("", parent.response.token_ids, messages).token_ids
        return Opened(parent, "appended", carried, np.concatenate([parent.token_ids(), carried]), digest)


def _best(calls: Sequence[Call], echoed: set[str]) -> Call:
    """The call of which, and of whose ancestors, most ids came back; then a delivered one; then the newest."""

    def rank(call: Call) -> tuple[int, bool]:
        return sum(not echoed.isdisjoint([of.name, *of.ids]) for of in call.path()), call.delivered

    return max(reversed(calls), key=rank) if len(calls) > 1 else calls[0]


def _without_leading_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Some agents change their system message in every turn; the text of the first turn stays in the prompt."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return messages[first:]
