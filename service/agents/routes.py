"""Requests that make no call: what the tokenizer and the model are, and what becomes of a session.

/v1/messages/count_tokens  /v1/models  /tokenize  /detokenize        for clients that count tokens before they call
/rl/sessions/ID/reward     /rl/sessions/ID/finish                    for agents that give their own reward, and workers
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from service.agents.calls import MODEL
from service.agents.dialects import chat
from service.agents.dialects.body import TokenIds, parse_body, read_as
from service.agents.dialects.chat import CHAT
from service.agents.dialects.dialect import Dialect, Refused
from service.agents.dialects.messages import MESSAGES, read_to_count
from service.agents.messages import read_messages
from service.agents.requests import Requests
from service.agents.session import Outcome, Session
from service.rollout.chat.chat import Chat
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.environment import Status, is_text
from service.rollout.plain_values import NotAllowed, float_or_nan, plain_info

Body = Mapping[str, Any]
MAX_END_BYTES = 1 << 20
"""Bytes of what an agent says about its session."""
Plain = Callable[[Session, Body], dict[str, Any]]
"""Answers the body of a request with a JSON object."""


class _Text(Struct):
    prompt: str


class _Ids(Struct):
    tokens: TokenIds


class Routes:
    """Answers what needs no policy."""

    def __init__(self, requests: Requests, of_model: Chat, max_model_len: int) -> None:
        self._requests = requests
        self._chat = of_model
        self._max_model_len = max_model_len

    def add_token_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Tokens and models, behind `prefix`."""
        router.add_post(f"{prefix}/v1/messages/count_tokens", self._about_tokens(_count_tokens, MESSAGES))
        router.add_get(f"{prefix}/v1/models", self._about_tokens(self._models))
        router.add_post(f"{prefix}/tokenize", self._about_tokens(self._tokenize))
        router.add_post(f"{prefix}/detokenize", self._about_tokens(self._detokenize))

    def add_session_routes(self, router: web.UrlDispatcher) -> None:
        """What an agent, or its worker, says about a session; a session's key decides which, whatever the path says."""
        router.add_post("/rl/sessions/{session}/reward", self._requests.guarded(CHAT, self._reward))
        router.add_post("/rl/sessions/{session}/finish", self._requests.guarded(CHAT, self._finish))

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._requests.managed(request)
        async with self._requests.body(request, MAX_END_BYTES) as raw:
            end = _end(parse_body(raw))
        session.check_open()
        session.posted = end.reward
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """Answered once the buffer has the trajectory's end; a repetition waits for it too, and changes nothing."""
        session = self._requests.managed(request)
        async with self._requests.body(request, MAX_END_BYTES) as raw:
            body = parse_body(raw)
        if not is_text(transcript := body.get("transcript", "")):
            raise Refused(400, "transcript", "is a text")
        end = _end(body)
        session.finish(end.reward, end.status, end.info, rewards=end.rewards)
        session.transcript = session.transcript or transcript
        if session.recorded is not None:
            await asyncio.wait({session.recorded})
        return web.json_response({})

    def _about_tokens(self, answer: Plain, dialect: Dialect = CHAT) -> Handler:
        """A body that may be as large as a prompt; `answer` changes nothing."""

        async def about_tokens(request: web.Request) -> web.StreamResponse:
            session = self._requests.session(request)
            async with self._requests.body(request, session.most_body_bytes) as raw, session.opening:
                answered = await self._requests.apart(len(raw), lambda: answer(session, _parsed(request, raw)))
                return web.json_response(answered)

        return self._requests.guarded(dialect, about_tokens)

    def _models(self, session: Session, body: Body) -> dict[str, Any]:
        model = {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "baton",
            "max_model_len": self._max_model_len,
        }
        return {"object": "list", "data": [model]}

    def _tokenize(self, session: Session, body: Body) -> dict[str, Any]:
        try:
            if body.get("prompt") is not None:
                ids = self._chat.encode(read_as(body, _Text).prompt)
            else:
                asked = chat.read(body)
                ids = self._chat.prompt(read_messages(asked.messages), asked.tools)
        except MessagesRefused as refused:
            raise Refused(400, "messages", str(refused)) from refused
        return {"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids.tolist()}

    def _detokenize(self, session: Session, body: Body) -> dict[str, Any]:
        ids = np.array(read_as(body, _Ids).tokens, np.int32)
        return {"prompt": self._chat.text(ids, with_special=True)}


def _parsed(request: web.Request, raw: bytes) -> Body:
    return parse_body(raw) if request.method == "POST" else {}


def _count_tokens(session: Session, body: Body) -> dict[str, Any]:
    """Tokens of the prompt that the same body would have as a call."""
    return {"input_tokens": len(session.opened(read_to_count(body)).prompt_ids)}


def _end(body: Body) -> Outcome:
    """What the agent says about its trajectory: its reward, how it ended, and further numbers.

    Raises:
        Refused: the reward is no number, the status none of those, or the numbers are something else.
    """
    reward, status = body.get("reward"), body.get("status", "ok")
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(float_or_nan(reward))):
        raise Refused(400, "reward", "is a finite number")
    if status not in get_args(Status):
        raise Refused(400, "status", f"is one of {', '.join(get_args(Status))}")
    try:
        return Outcome(reward, status, plain_info(body.get("info")), plain_info(body.get("rewards"), "rewards"))
    except NotAllowed as refused:
        raise Refused(400, "rewards" if refused.detail.startswith("rewards") else "info", refused.detail) from refused
