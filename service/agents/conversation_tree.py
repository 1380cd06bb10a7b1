"""The calls of one agent as a tree. A child's prompt begins with the exact tokens of its parent's prompt and response.

    call 0   user: age of fox?                                  prompt  P            sampled  A
    call 1   user, assistant A, tool: 17                        prompt  P A t        sampled  B
    call 2   user, assistant A, tool: 18   (another branch)     prompt  P A u        sampled  C
    call 3   user, assistant A changed, tool: 17                prompt  Q            (a root: rendered as a whole)

`t` and `u` are the tools' messages as the chat template renders them between two turns. A client sends back messages,
not tokens. The messages only select the parent; the prompt begins with the parent's tokens. A response is never
tokenised again, so its tokens and log-probabilities stay as the engine sampled them.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, dropwhile, islice, takewhile
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from service.agents.messages_and_replies import Reply, ReplyParser, digests, echoed_ids, extended, read_messages
from service.columns import digest
from service.handoff.prefixes.sharing import StepTree, longest_prefix
from service.handoff.steps.tables import step_objects
from service.rollout.chat.chat import Chat, MessagesRefused, Tool
from service.rollout.chat.conversation import Response, as_sampled, with_end
from service.rollout.engine import Generation
from service.rollout.environment import Message
from service.types import NO_VERSION, Extension, Int32s, Step, Steps

COMPARED = 32
"""Maximum number of earlier conversations with which the prompt of a new conversation is compared."""

How = Literal["root", "appended", "rerendered"]
"""How a prompt was made. `root`: a new conversation. `appended`: tokens were appended to a parent's. `rerendered`: the
whole conversation was rendered, because it contains answers that no call sampled."""


class CallNote(msgspec.Struct, frozen=True, array_like=True):
    """The fields of an `AgentCall` that its step lacks; digests are in hex. The step stores them as its note, so that a
    restarted generator can continue the session."""

    name: str
    parent: int
    """Index of the call that this call continues; -1: none."""
    how: How
    body: str
    after: str
    system: str | None = None
    """The digest of the system messages with which a root begins; None for other calls."""
    has_tools: bool = False
    """Whether the client offered tools; recorded for roots only."""
    named: str | None = None
    age: float = 0.0
    """Seconds for which the session had been open when the call was made."""


class Beginning(NamedTuple):
    """How a client began a conversation: system messages, first messages, tools. This decides the conversation's
    role."""

    system: bytes
    """Digest of the leading system messages."""
    text: str
    """All messages before the first answer."""
    has_tools: bool


@dataclass(slots=True, eq=False)
class AgentCall:
    """One call of the policy in the tree."""

    name: str
    """The call's id. A client may send it back, for instance as the signature of the thinking."""
    parent: AgentCall | None
    how: How
    carried_ids: Int32s
    """[Q] prompt tokens after the parent's tokens; without a parent, the whole prompt."""
    response: Response
    reply: Reply
    body: str
    """Identifies the client's request: a repeated request has the same value."""
    stop_reason: str
    """Why the engine stopped: `stop` or `length`."""
    index: int
    """The call's number in the tree; calls are numbered as they were sampled."""
    after: bytes = b""
    """Digest of the conversation that ends with the reply; empty if the prompt was given as token ids."""
    begun: Beginning | None = None
    """How the client began the conversation; only for a root whose prompt was given as messages."""
    named: str | None = None
    """The role that the client names for the conversation; None: the client names no role."""
    delivered: bool = False
    """Whether the client has received the reply, as far as the server can tell."""
    marks: set[str] = field(default_factory=set)
    """The gateway's marks of the requests that the reply answered."""
    is_restored: bool = False
    """Whether an earlier process sampled the call. Then the reply is parsed from the tokens when a client repeats the
    request."""

    def note(self, age: float) -> str:
        """The note of the call's step: a `CallNote` as JSON. `age`: seconds for which the session has been open."""
        parent = -1 if self.parent is None else self.parent.index
        system = self.begun.system.hex() if self.begun is not None else None
        has_tools = self.begun is not None and self.begun.has_tools
        note = CallNote(self.name, parent, self.how, self.body, self.after.hex(), system, has_tools, self.named, age)
        return msgspec.json.encode(note).decode()

    @property
    def ids(self) -> list[str]:
        """The ids of the tool calls in the reply."""
        return [f"call_{self.name}_{number}" for number in range(len(self.reply.calls))]

    def path(self) -> Iterator[AgentCall]:
        """This call and its ancestors, up to the root."""
        call: AgentCall | None = self
        while call is not None:
            yield call
            call = call.parent

    def token_ids(self) -> Int32s:
        """[P + T] ids of the whole prompt and the response."""
        parts = [part for call in self.path() for part in (call.response.token_ids, call.carried_ids)]
        return np.concatenate(parts[::-1])

    @property
    def n_prompt(self) -> int:
        """Number of tokens of the whole prompt."""
        return len(self.token_ids()) - len(self.response.token_ids)

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the policy sampled; an appended end token is not counted."""
        return int(self.response.loss_mask.sum())

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


class PreparedCall(NamedTuple):
    """A call of the policy that is ready to be sampled: its prompt, and how it continues an earlier call."""

    parent: AgentCall | None
    how: How
    carried_ids: Int32s
    prompt_ids: Int32s
    """[Q] ids of the whole prompt."""
    digest: bytes | None
    """Digest of the conversation up to this call; None if the client sent token ids."""
    tools: Sequence[Tool] = ()
    """Tools that the reply may call."""
    begun: Beginning | None = None
    received: Sequence[AgentCall] = ()
    """Earlier calls whose replies the client must have received, because its request sends them back."""
    named: str | None = None
    prefix: str = ""
    """The beginning of the answer, if the client wrote it; it is part of the prompt."""


class ConversationTree:
    """All calls of one agent, with the tokens of each."""

    def __init__(
        self, chat: Chat, parser: ReplyParser, new_name: Callable[[], str] = lambda: secrets.token_hex(12)
    ) -> None:
        self._chat = chat
        self._parser = parser
        self._new_name = new_name
        self.calls: list[AgentCall] = []
        self._after: defaultdict[bytes, list[AgentCall]] = defaultdict(list)
        """Calls by digest: the digest of the conversation that ends with the call's reply."""
        self._of_ids: dict[tuple[int, int], AgentCall] = {}
        """The newest call for each (number of tokens, digest of the tokens)."""
        self._newest_of: dict[str, AgentCall] = {}
        """For each body of a request, the newest call that answers it."""

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template puts a request's tools into the prompt."""
        return self._chat.shows_tools

    def named(self, of: str, tools: Sequence[Tool] = ()) -> AgentCall | None:
        """The call whose name is part of the id `of`, which a client received; None if there is no such call."""
        call = next((call for call in reversed(self.calls) if call.name in of.split("_")), None)
        return None if call is None else self._parsed(call, tools)

    def _parsed(self, call: AgentCall, tools: Sequence[Tool]) -> AgentCall:
        if call.is_restored:
            sampled = call.response.token_ids[call.response.loss_mask]
            call.reply, call.is_restored = self._reply(sampled, not call.after, tools), False
        return call

    def pieces(self, call: AgentCall) -> list[bytes]:
        """The bytes of each token's text that the policy sampled in a call."""
        return self._chat.pieces(call.response.token_ids[call.response.loss_mask])

    def open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        echoed: Collection[str] = (),
        prefix: str = "",
        before: AgentCall | None = None,
    ) -> PreparedCall:
        """Make the prompt of a client's request. It continues the longest earlier call that matches the messages. If no
        call matches, it is the whole conversation as the chat template renders it.

        If several calls have equal content, the client's ids decide: those in tool calls, and `echoed`. The call with
        the most of them is continued. `prefix`: the beginning of the answer, which the policy continues. `before`: the
        call after which `messages` begin; None: `messages` are the whole conversation.

        Raises:
            MessagesRefused: a message cannot be read, or the chat template refuses it.
        """
        context = [] if before is None else [before.message()]
        read = read_messages([*context, *messages])[len(context) :]
        # Some agents change leading system messages in every turn: the first turn's messages stay.
        said = list(dropwhile(lambda message: message["role"] == "system", read))
        digest_of = digests(said, tools) if before is None else [*accumulate(said, extended, initial=before.after)]
        begun = [self._chat.answer(prefix, continues=True)] if prefix else []
        known = {
            *echoed,
            *(of.name for of in (before,) if of),
            *(of.removeprefix("call_").rpartition("_")[0] for of in echoed_ids(messages)),
        }
        received = self._received(read, known)
        for length in range(len(said), -1, -1):
            if found := self._after.get(digest_of[length]):
                if any(message["role"] == "assistant" for message in said[length:]):
                    break
                parent = _best(found, known)
                follows = self._chat.delta(said[length:], int(parent.response.token_ids[-1]))
                carried = np.concatenate([follows, *begun])
                whole = np.concatenate([parent.token_ids(), carried])
                return PreparedCall(
                    parent, "appended", carried, whole, digest_of[-1], tools, received=received, prefix=prefix
                )
        if before is not None:
            raise MessagesRefused("send the whole conversation; these messages cannot follow the earlier response")
        how: How = "rerendered" if any(message["role"] == "assistant" for message in said) else "root"
        whole = np.concatenate([self._chat.prompt(read, tools), *begun])
        first = takewhile(lambda message: message["role"] != "assistant", read)
        beginning = Beginning(
            digests(read[: len(read) - len(said)], ())[-1],
            "\n".join(message["content"] for message in first),
            bool(tools),
        )
        return PreparedCall(None, how, whole, whole, digest_of[-1], tools, beginning, received, prefix=prefix)

    def open_ids(self, ids: Int32s) -> PreparedCall:
        """Make the prompt of a client that sends [Q] token ids. The prompt continues the longest earlier call whose
        tokens are a prefix of it.

        Raises:
            MessagesRefused: an id is outside of the vocabulary.
        """
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._chat.vocab_size:
            raise MessagesRefused(f"a token id is outside of the vocabulary of {self._chat.vocab_size}")
        lengths = sorted({length for length, _ in self._of_ids if length < len(ids)}, reverse=True)
        for length in lengths:
            if parent := self._of_ids.get((length, digest(ids[:length]))):
                return PreparedCall(parent, "appended", ids[length:], ids, None)
        return PreparedCall(None, "root", ids, ids, None)

    def add(self, opened: PreparedCall, generation: Generation, body: str) -> AgentCall:
        """Add a call with the tokens that the engine sampled for it.

        An end token is appended if the policy sampled none. A client that sends token ids appends its own end token.
        """
        reply = self._reply(generation.token_ids, opened.digest is None, opened.tools)
        brings_tokens = opened.digest is None and len(generation.token_ids)
        response = as_sampled(generation) if brings_tokens else with_end(generation, self._chat)
        call = self._call(opened, response, reply, body, generation.stop_reason)
        if opened.digest is not None:
            (message,) = read_messages([call.message()])
            message["content"] = opened.prefix + message["content"]
            call.after = extended(opened.digest, message)
        self._keep(call, np.concatenate([opened.prompt_ids, response.token_ids]))
        return call

    def reference(self, call: AgentCall) -> Extension | None:
        """The reference of a call's step to an earlier step. With a parent: to the parent's whole step. Without: to the
        longest prefix that the prompt shares with one of the newest calls that no other call continues."""
        if call.parent is not None:
            before = call.parent.token_ids()
            return Extension(call.parent.index, len(before), digest(before))
        earlier = self.calls[: call.index]
        continued = {each.parent.index for each in earlier if each.parent is not None}
        leaves = (each for each in reversed(earlier) if each.index not in continued)
        return longest_prefix(call.carried_ids, ((leaf.index, leaf.token_ids()) for leaf in islice(leaves, COMPARED)))

    def restore(self, steps: Steps) -> float:
        """Restore the calls that an earlier process sampled from their `steps`, which the buffer accepted. Returns the
        session's age at the last call, in seconds.

        Only tokens are restored: a reply is parsed again from its tokens if a client repeats the request.

        Raises:
            ValueError: a step is missing, or is not a call of this session.
        """
        prefixes, objects, age = StepTree(), step_objects(steps), 0.0
        for place, k in enumerate(np.argsort(steps.index_K, kind="stable").tolist()):
            step, note = objects[k], _note_of(objects[k], place)
            age = note.age
            token_ids = prefixes.add(steps, k).tokens()
            parent = self.calls[note.parent] if note.parent >= 0 else None
            before = parent.token_ids() if parent is not None else token_ids[:0]
            if not np.array_equal(before, token_ids[: (begins := len(before))]):
                raise ValueError(f"step {step.index} continues other tokens than those of step {note.parent}")
            logprobs = step.logprobs if step.logprobs is not None else np.zeros(len(step.response_ids), np.float32)
            response = Response(step.response_ids, logprobs, step.loss_mask, step.versions)
            carried = token_ids[begins : len(token_ids) - len(response.token_ids)]
            said = self._chat.said(response.token_ids) if parent is None else ""
            begun = None
            if note.system is not None:
                begun = Beginning(bytes.fromhex(note.system), self._chat.text(carried), note.has_tools)
            call = AgentCall(
                note.name, parent, note.how, carried, response, Reply(said, "", ()), note.body, step.stop_reason,
                step.index, bytes.fromhex(note.after), begun, note.named,
                is_restored=True,
            )  # fmt: skip
            if parent is not None:
                parent.delivered = True  # a client that continues a call has received its reply
            self._keep(call, token_ids)
        return age

    def _keep(self, call: AgentCall, token_ids: Int32s) -> None:
        if call.after:
            self._after[call.after].append(call)
        self._of_ids[len(token_ids), digest(token_ids)] = call
        self.calls.append(call)
        self._newest_of[call.body] = call

    def _reply(self, token_ids: Int32s, brings_tokens: bool, tools: Sequence[Tool]) -> Reply:
        text = self._chat.said(token_ids)
        return Reply(text, "", ()) if brings_tokens else self._parser.parse(text, tools, token_ids.tolist())

    def unsampled(self, opened: PreparedCall, text: str) -> AgentCall:
        """A call that the server answers with `text` in place of the policy. The call is not added to the tree."""
        token_ids = self._chat.answer(text)
        n = len(token_ids)
        response = Response(token_ids, np.zeros(n, np.float32), np.zeros(n, np.bool_), np.full(n, NO_VERSION, np.int64))
        return self._call(opened, response, Reply(text, "", ()), "", "stop")

    def _call(self, opened: PreparedCall, response: Response, reply: Reply, body: str, stop_reason: str) -> AgentCall:
        return AgentCall(
            self._new_name(),
            opened.parent,
            opened.how,
            opened.carried_ids,
            response,
            reply,
            body,
            stop_reason,
            len(self.calls),
            begun=opened.begun,
            named=opened.named,
        )

    def replayed(
        self, body: str, is_retry: bool = False, tools: Sequence[Tool] = (), mark: str = ""
    ) -> AgentCall | None:
        """The earlier call that answers a repeated request; None if the policy must be called. `tools`: the request's
        tools; `mark`: the gateway's mark of the request.

        Some clients do not mark retries. So a request with the same body counts as a retry until the reply is
        delivered. After the delivery it asks for another sample, except if the gateway repeats the delivered request.
        """
        call = self._newest_of.get(body)
        if call is None or (call.delivered and not is_retry and (not mark or mark not in call.marks)):
            return None
        return self._parsed(call, tools)

    def _received(self, messages: Sequence[Message], echoed: Collection[str]) -> list[AgentCall]:
        """The calls that are not marked as delivered, but whose replies the client sends back. Other messages may have
        changed."""
        if not (unknown := [call for call in self.calls if not call.delivered]):
            return []
        said = {extended(b"", message) for message in messages if message["role"] == "assistant"}
        replies = [extended(b"", *read_messages([call.message()])) for call in unknown]
        return [
            call
            for call, reply in zip(unknown, replies, strict=True)
            if call.name in echoed or (reply in said and not call.is_restored)
        ]


def _note_of(step: Step, place: int) -> CallNote:
    """The note of a session's step. The step must have the index `place`.

    Raises:
        ValueError: an earlier step is missing, the step has no note of a call, or its parent is no earlier step.
    """
    if step.index != place:
        raise ValueError(f"step {place} is missing")
    try:
        note = msgspec.json.decode(step.note, type=CallNote)
    except msgspec.MsgspecError as error:
        raise ValueError(f"step {place} has no note of a call: {error}") from error
    if not -1 <= note.parent < place:
        raise ValueError(f"step {place} continues step {note.parent}")
    return note


def _best(calls: Sequence[AgentCall], echoed: set[str]) -> AgentCall:
    """The call for which the client sent back the most ids, of the call or its ancestors. If several calls have equally
    many, delivered calls come first, then the newest."""
    return max(reversed(calls), key=lambda call: (sum(of.name in echoed for of in call.path()), call.delivered))
