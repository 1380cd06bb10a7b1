"""Requests that do not call the policy: token counts, models, and ends of sessions.

/v1/messages/count_tokens  /v1/models                                for clients that count tokens before they call
/rl/sessions/ID            .../reward          .../finish            for agents that finish their own session
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from service.agents.dialects.body import parse_body
from service.agents.dialects.dialect import MODEL, Refused
from service.agents.dialects.messages import read_to_count
from service.agents.policy_calls import COUNT_TOKENS
from service.agents.requests import NO_ROOM, Requests
from service.agents.session import Outcome, Session, plain_outcome
from service.handoff.steps.values import NEEDED
from service.rollout.environment import is_text
from service.rollout.plain_values import NotAllowed

Body = Mapping[str, Any]
MAX_END_BYTES = 1 << 20
"""Maximum bytes of the body with which an agent ends its session."""


class Routes:
    """Handles requests that need no policy."""

    def __init__(self, requests: Requests, max_model_len: int) -> None:
        self._requests = requests
        self._max_model_len = max_model_len

    def add_token_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Add the routes for token counts and models; each path begins with `prefix`."""
        router.add_post(prefix + COUNT_TOKENS, self._about_tokens(_count_tokens))
        router.add_get(f"{prefix}/v1/models", self._about_tokens(self._models))
        router.add_get(f"{prefix}/v1/models/{{model}}", self._about_tokens(self._model))

    def add_session_routes(self, router: web.UrlDispatcher) -> None:
        """Add the routes by which agents look at their session and end it. The key of a request selects the session,
        not the name in the path."""
        path = "/rl/sessions/{session}"
        router.add_get(path, self._show)
        router.add_post(f"{path}/reward", self._reward)
        router.add_post(f"{path}/finish", self._finish)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _about_tokens(self, answer: Callable[[Session, Body], dict[str, Any]]) -> Handler:
        """Make a handler for a body that may be as large as a prompt; `answer` must not change any state."""

        async def about_tokens(request: web.Request) -> web.StreamResponse:
            session = self._requests.session(request)

            def read(raw: bytes) -> dict[str, Any]:
                return answer(session, parse_body(raw) if request.method == "POST" else {})

            async with self._requests.prompt(request, session, read) as found:
                return web.json_response(found)

        return about_tokens

    def _models(self, session: Session, body: Body) -> dict[str, Any]:
        return {"object": "list", "data": [self._model(session, body)]}

    def _model(self, session: Session, body: Body) -> dict[str, Any]:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "baton"}
        return {**model, "max_model_len": self._max_model_len}

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def _show(self, request: web.Request) -> web.StreamResponse:
        session = self._requests.managed(request)
        return web.json_response({"session": session.name, "state": session.state, "calls": session.n_steps})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """Note the reward of a session that is finished without one."""
        session = self._requests.managed(request)
        async with self._requests.body(request, MAX_END_BYTES) as raw:
            body = parse_body(raw)
        with _naming_the_field():
            outcome = _outcome(body)
            session.rewards_of_calls(outcome)
        session.check_open()
        session.posted = outcome.reward
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """Finish a session; the answer comes once the buffer has answered about the trajectory's end. A repeated
        request with the same body changes nothing.

        Raises:
            Refused: 409 if the session is over or was finished with another body, or if the buffer refused the end;
                503 if the buffer was not asked.
        """
        session: Session | None = None
        try:
            session = self._requests.managed(request)
        except Refused:
            if not self._requests.finished_with(request):
                raise
        async with self._requests.body(request, MAX_END_BYTES) as raw:
            body = parse_body(raw)
        digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
        before = self._requests.finished_with(request)
        if before not in ("", digest):
            raise Refused(409, None, "the session was finished with another body")
        if session is not None:
            if not before:
                _end(session, body)
                self._requests.sessions.finished(session, digest)
            await asyncio.wait({session.recorded})
            if session.recorded.cancelled():
                raise Refused(NO_ROOM, None, "the buffer was not asked; send the request again")
            if not session.recorded.result():
                self._requests.sessions.finished(session, "")
                raise Refused(409, None, "the buffer wants no more of this trajectory")
        return web.json_response({})


def _count_tokens(session: Session, body: Body) -> dict[str, Any]:
    """Number of prompt tokens that a call with the same body would have."""
    return {"input_tokens": len(session.opened(read_to_count(body)).prompt_ids)}


def _end(session: Session, body: Body) -> None:
    if not is_text(transcript := body.get("transcript", "")):
        raise Refused(400, "transcript", "is a text")
    with _naming_the_field():
        session.end(_outcome(body), session.transcript or transcript)


def _outcome(body: Body) -> Outcome:
    """The result of a trajectory in a request: its reward, its status, and further numbers.

    Raises:
        Refused: the reward is a bool.
        NotAllowed: a value is not allowed.
    """
    if isinstance(body.get("reward"), bool):
        raise Refused(400, "reward", f"{NEEDED} is needed")
    return plain_outcome(**{name: body[name] for name in Outcome._fields if name in body})


@contextmanager
def _naming_the_field() -> Iterator[None]:
    """Turn `NotAllowed` into a refusal of the field at fault."""
    try:
        yield
    except NotAllowed as refused:
        field = re.split(r"\W", refused.detail, maxsplit=1)[0]
        raise Refused(400, field, refused.detail) from refused
