"""The endpoint: agents call the policy over HTTP, each in its own API dialect, with the key of its session.

/v1/...  /inference/v1/generate                                      calls of the policy (policy_calls.py)
/v1/messages/count_tokens  /v1/models                                for clients that count tokens before they call
/rl/sessions/ID            .../reward          .../finish            for agents that finish their own session
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from service.agents.dialects.body import parse_body
from service.agents.dialects.dialect import MODEL, Refused
from service.agents.dialects.messages import read_to_count
from service.agents.listening import Listener
from service.agents.policy_calls import COUNT_TOKENS, NAMED, PolicyCalls, dialect_of
from service.agents.requests import NO_ROOM, REFUSED_HEADER, SESSION, Requests, cut, key_of
from service.agents.session import Outcome, Session
from service.agents.sessions import Sessions
from service.handoff.steps.values import NEEDED
from service.rollout.environment import is_text
from service.rollout.plain_values import NotAllowed

log = logging.getLogger(__name__)

CLOSING = frozenset({401, 409})
"""HTTP statuses of requests that have no key of an open session. Their connection is closed."""


class Endpoint:
    """Serves the sessions of one generator."""

    def __init__(
        self, sessions: Sessions, max_model_len: int, structured: str, named_roles: Sequence[str] = ()
    ) -> None:
        """`max_model_len`: maximum tokens of a prompt and its response; `structured`: the setting `agents.structured`;
        `named_roles`: see `role_named`."""
        self.requests = Requests(sessions)
        self.calls = PolicyCalls(self.requests, named_roles, structured)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "baton"}
        self._model = {**model, "max_model_len": max_model_len}
        self._listener = Listener()
        self.is_abandoned = False
        """Whether requests get no answer, but a closed connection: other generators continue the sessions."""

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address that clients call, such as `http://127.0.0.1:41234`."""
        app = web.Application(middlewares=[self._answered])
        for prefix in ("", NAMED):
            self.calls.add_routes(app.router, prefix)
            app.router.add_post(prefix + COUNT_TOKENS, self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", self._show_models)
            app.router.add_get(f"{prefix}/v1/models/{{model}}", self._show_models)
        # The key of a request selects the session, not the name in the path.
        app.router.add_get(path := "/rl/sessions/{session}", self._show)
        app.router.add_post(f"{path}/reward", self._reward)
        app.router.add_post(f"{path}/finish", self._finish)
        return await self._listener.start(app, host, port)

    async def stop(self) -> None:
        """Close the connections; waiting requests are abandoned."""
        await self._listener.stop()

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer. An error gets the form of the path's dialect."""
        self._listener.heard(request)
        dialect = dialect_of(request.path)
        try:
            response = await handler(request)
        except web.HTTPException as unknown:  # no such path: no key was read
            refused = Refused(unknown.status, None, f"there is no {request.method} {request.path:.200}")
            with suppress(Refused):  # the key is unknown
                self.requests.managed(request)
            response = await self.requests.refuse(request, dialect, refused)
            response.force_close()
        except Refused as refused:
            response = await self.requests.refuse(request, dialect, refused)
        except ConnectionError:  # the client has left, or must go to another generator
            self.requests.undelivered += 1
            response = cut(request)
        except NotAllowed as wrong:  # by the body with which an agent ends its session
            field = re.split(r"\W", wrong.detail, maxsplit=1)[0]
            response = await self.requests.refuse(request, dialect, Refused(400, field, wrong.detail))
        except Exception:  # a bug, or the engine died, and another generator continues the session
            log.exception("a request of dialect %s failed", dialect.name)
            session = request.get(SESSION)
            if session is not None and session.moves:
                response = cut(request)
            else:
                response = await self.requests.refuse(request, dialect, Refused(500, None, "the endpoint failed"))
        if self.is_abandoned:
            response = cut(request)
        if response.status in CLOSING:
            response.force_close()
        return response

    # -- requests without the policy ----------------------------------------------------------------------------------

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Count the prompt tokens that a call with the same body would have."""
        session = self.requests.session(request)

        def read(raw: bytes) -> int:
            return len(session.opened(read_to_count(parse_body(raw))).prompt_ids)

        async with self.requests.prompt(request, session, read) as n_tokens:
            return web.json_response({"input_tokens": n_tokens})

    async def _show_models(self, request: web.Request) -> web.StreamResponse:
        self.requests.session(request)
        is_list = "model" not in request.match_info
        return web.json_response({"object": "list", "data": [self._model]} if is_list else self._model)

    async def _show(self, request: web.Request) -> web.StreamResponse:
        session = self.requests.managed(request)
        if session.moves:
            raise ConnectionResetError("the session moves")
        if told := re.fullmatch(r"(\d{3}) (.+)", request.headers.get(REFUSED_HEADER, "")):
            session.note_refusal(Refused(int(told[1]), None, told[2]), "through the gateway")
        return web.json_response({"session": session.name, "state": session.state, "calls": session.n_steps})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """Store a reward, which counts if the session is finished without a reward. `Refused` for any other field."""
        session = self.requests.managed(request)
        async with self.requests.body(request) as raw:
            body = parse_body(raw)
        outcome = _outcome(body)
        if others := body.keys() - {"reward"}:
            raise Refused(400, min(others), "is for finish; a reward alone is kept")
        session.rewards_of_calls(outcome)
        session.check_open()
        session.posted = outcome.reward
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """Finish a session, and answer once the buffer has answered about the trajectory's end. A repeated request with
        the same body changes nothing.

        Raises:
            Refused: 409 if the session is over, was finished with another body, or the buffer refused the end; 503 if
            the buffer was not asked.
        """
        session: Session | None = None
        sessions, key = self.requests.sessions, key_of(request)
        try:
            session = self.requests.managed(request)
        except Refused:
            if not sessions.finished_with(key):
                raise
        async with self.requests.body(request) as raw:
            body = parse_body(raw)
        digest = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
        before = sessions.finished_with(key)
        if before not in ("", digest):
            raise Refused(409, None, "the session was finished with another body")
        if session is not None:
            if not before:
                if not is_text(transcript := body.get("transcript", "")):
                    raise Refused(400, "transcript", "is a text")
                session.end(_outcome(body), session.transcript or transcript)
                sessions.asked(session, digest)
            await asyncio.wait({session.recorded})
            if session.recorded.cancelled():
                raise Refused(NO_ROOM, None, "the buffer was not asked; send the request again")
            if not session.recorded.result():
                raise Refused(409, None, "the buffer takes no more of this trajectory")
        return web.json_response({})


def _outcome(body: Mapping[str, Any]) -> Outcome:
    """The trajectory's result in the body of a request: its reward, its status, and further values.

    Raises:
        Refused: the reward is a bool, or a field is unknown.
        NotAllowed: a value is not allowed.
    """
    if unknown := body.keys() - {*Outcome._fields, "transcript"}:
        raise Refused(400, min(unknown), f"is none of {', '.join(Outcome._fields)}, transcript")
    if isinstance(body.get("reward"), bool):
        raise Refused(400, "reward", f"{NEEDED} is needed")
    return Outcome(**{name: body[name] for name in Outcome._fields if name in body}).plain()
