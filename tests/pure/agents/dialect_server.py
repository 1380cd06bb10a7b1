"""One conversation tree behind the dialects, with a policy that follows a script; no sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from service.agents.conversation_tree import ConversationTree, PreparedCall
from service.agents.dialects.body import parse_body
from service.agents.dialects.dialect import CallAnswer, CallRequest, Dialect, Refused
from service.agents.dialects.messages import read_to_count
from service.agents.messages_and_replies import JsonCalls
from service.agents.policy_calls import DIALECTS
from service.rollout.chat.chat import Chat
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.engine import Generation
from service.types import PolicyVersion

COUNT = "/count_tokens"
VERSION = PolicyVersion(1, 5).pack()


class Served(NamedTuple):
    """An answer over HTTP."""

    status: int
    body: bytes
    is_stream: bool


class DialectServer:
    """Answers requests of all dialects; every call is kept in the tree."""

    def __init__(self, chat: Chat, replies: Iterator[str]) -> None:
        self.chat = chat
        self.replies = replies
        names = count()
        self.tree = ConversationTree(chat, JsonCalls(), lambda: f"n{next(names)}")
        self.asked: list[CallRequest] = []
        self.failure: Refused | None = None
        """What goes wrong after the headers of a stream were sent."""

    def post(self, path: str, raw: bytes) -> Served:
        dialect = DIALECTS[path.removesuffix(COUNT)]
        try:
            if path.endswith(COUNT):
                to_count = read_to_count(parse_body(raw))
                return Served(200, _json({"input_tokens": len(self._open(to_count).prompt_ids)}), False)
            asked = dialect.read(parse_body(raw))
            answer = self._answer(asked, raw)
        except MessagesRefused as error:
            return _refused(dialect, Refused(400, "messages", str(error)))
        except Refused as refused:
            return _refused(dialect, refused)
        self.asked.append(asked)
        if asked.stream:
            frames = dialect.events(answer, asked) if self.failure is None else [dialect.error_event(self.failure)]
            return Served(200, b": engine is paused\n\n" + b"".join(frames), True)
        return Served(200, _json(dialect.reply(answer, asked)), False)

    def _answer(self, asked: CallRequest, raw: bytes) -> CallAnswer:
        opened = self._open(asked)
        # Not the tokens that a tokenizer would choose.
        ids = [token for letter in next(self.replies) for token in self.chat.plain(letter).tolist()]
        call = self.tree.add(opened, generated([*ids, self.chat.end_id]), str(raw))
        return CallAnswer(call, 5)

    def _open(self, asked: CallRequest) -> PreparedCall:
        said = asked.messages or [{"role": "user", "content": str(asked.prompt)}]
        opened = self.tree.open(said, asked.tools, asked.echoed, asked.begun)
        return opened if asked.may_call else opened._replace(tools=())


def generated(token_ids: list[int]) -> Generation:
    n = len(token_ids)
    logprobs, versions = np.full(n, -0.5, np.float32), np.full(n, VERSION, np.int64)
    return Generation(np.asarray(token_ids, np.int32), logprobs, versions, "stop", sampled_end=True)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each frame that has one."""
    frames = [frame for frame in stream.decode().split("\n\n") if frame and not frame.startswith(":")]
    data = [frame.rpartition("data: ")[2] for frame in frames]
    return [json.loads(one, parse_constant=_refuse) for one in data if one != "[DONE]"]


def _refused(dialect: Dialect, refused: Refused) -> Served:
    return Served(refused.status, _json(dialect.error(refused)), False)


def _json(value: Any) -> bytes:
    """JSON that every client reads."""
    return json.dumps(value, allow_nan=False).encode()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
