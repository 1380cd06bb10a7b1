"""The endpoint: agents call the policy over HTTP, each in its own API dialect, with the key of its session.

server.py        connections and paths
requests.py      keys, bodies, refusals
policy_calls.py  calls of the policy
routes.py        requests that do not call the policy: tokens, models, ends of sessions
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from service.agents.dialects.chat import CHAT
from service.agents.dialects.dialect import Dialect, Refused, openai_error
from service.agents.dialects.messages import MESSAGES
from service.agents.policy_calls import COUNT_TOKENS, DIALECTS, Calls
from service.agents.requests import MAX_BODY_BYTES, STREAM, Requests
from service.agents.routes import Routes
from service.agents.sessions import Sessions

log = logging.getLogger(__name__)

NAMED = "/s/{session}"
"""Optional prefix of a path, which names the session."""
FIRST_SECONDS = 30.0
"""Seconds in which a new connection must send its first request."""
IDLE_SECONDS = 30.0
"""Seconds without a request after which a connection is closed."""
UNREAD_SECONDS = 60.0
"""Seconds after which a connection is closed if its client reads nothing of the answer that is being sent."""
MAX_CONNECTIONS = 4096
"""Maximum number of open connections; further ones are closed."""
CLOSING = frozenset({401, 409})
"""HTTP statuses for requests without the key of an open session; their connection is closed."""


class Endpoint:
    """Serves the sessions of one generator."""

    def __init__(
        self,
        sessions: Sessions,
        max_model_len: int,
        structured: str,
        named_roles: Sequence[str] = (),
    ) -> None:
        """`max_model_len`: maximum tokens of a prompt and its
        response; `structured`: the setting `agents.structured`; `named_roles`: see `role_named`."""
        self.requests = Requests(sessions)
        self.calls = Calls(self.requests, named_roles, structured)
        self._routes = Routes(self.requests, max_model_len)
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        """Connections that have sent no request yet, each with the timer that closes it."""
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address that clients call, such as `http://127.0.0.1:41234`."""
        silent = logging.getLogger(f"{__name__}.http")  # aiohttp's log may quote requests, and therefore keys
        silent.setLevel(logging.CRITICAL + 1)
        runner = self._runner = web.AppRunner(
            self.application(),
            access_log=None,
            logger=silent,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_SECONDS,
        )
        await runner.setup()
        loop, server = asyncio.get_running_loop(), runner.server
        if server is None:
            raise RuntimeError("aiohttp made no server")
        self._listening = await loop.create_server(partial(self._accept, server, loop), host, port)
        for listening in self._listening.sockets:  # each connection inherits it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_SECONDS * 1000))
        bound = self._listening.sockets[0].getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"http://{shown}:{bound[1]}"

    async def stop(self) -> None:
        """Close the connections; waiting requests are abandoned."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self.requests.close()

    def application(self) -> web.Application:
        """The web application with all routes."""
        app = web.Application(middlewares=[self._answered], client_max_size=MAX_BODY_BYTES)
        for prefix in ("", NAMED):
            self.calls.add_routes(app.router, prefix)
            self._routes.add_token_routes(app.router, prefix)
        self._routes.add_session_routes(app.router)
        return app

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        """Accept a connection, with a timeout for silent clients: these would otherwise hold a file descriptor for
        ever."""
        connection = server()
        full = len(server.connections) >= MAX_CONNECTIONS
        self._silent[connection] = loop.call_later(0.0 if full else FIRST_SECONDS, self._cut, connection)
        return connection

    def _cut(self, connection: RequestHandler) -> None:
        del self._silent[connection]
        if connection.transport is not None:
            connection.transport.abort()

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's answer; an error has the form of the path's dialect."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        dialect = _dialect(request)
        try:
            response = await handler(request)
        except web.HTTPException as unknown:  # no such path: no key was read
            refused = Refused(unknown.status, None, f"there is no {request.method} {request.path:.200}")
            response = web.json_response(openai_error(refused), status=unknown.status)
            response.force_close()
        except Refused as refused:
            response = await self.requests.refuse(request, dialect, refused)
        except ConnectionError:  # the client has left
            self.requests.undelivered += 1
            response = request.get(STREAM) or web.Response()
        except Exception:  # a bug, or the engine died: the client gets an error in its dialect
            log.exception("a request of dialect %s failed", dialect.name)
            response = await self.requests.refuse(request, dialect, Refused(500, None, "the endpoint failed"))
        if response.status in CLOSING:
            response.force_close()
        return response


def _dialect(request: web.Request) -> Dialect:
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical.removeprefix(NAMED)
    return MESSAGES if path == COUNT_TOKENS else DIALECTS.get(path, CHAT)
