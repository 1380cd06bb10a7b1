"""An HTTP server that limits the number of connections, and closes those whose clients stay silent or never read."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from service.agents.requests import key_of

FIRST_SECONDS = 30.0
"""Seconds in which a new connection must send its first request."""
IDLE_SECONDS = 30.0
"""Seconds without a request after which a connection is closed."""
LINGER_SECONDS = 2.0
"""Seconds for which the rest of a refused body is read, so that the client sees the refusal."""
UNREAD_SECONDS = 60.0
"""Seconds after which a connection is closed if its client reads nothing of an answer."""
MAX_CONNECTIONS = 4096
"""Maximum number of open connections. If one more opens, a connection is closed: the oldest of the session that has
most."""


class Listener:
    """Serves an application at one address."""

    def __init__(self) -> None:
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        """Connections that have sent no request yet, each with the timer that closes it."""
        self._keys: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """The key of each connection's newest request."""
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self, app: web.Application, host: str, port: int, **options: Any) -> str:
        """Listen, and return the address that clients call, such as `http://127.0.0.1:41234`. `options`: options of
        aiohttp's server."""
        silent = logging.getLogger(f"{__name__}.http")  # aiohttp's log may quote requests, with keys
        silent.setLevel(logging.CRITICAL + 1)
        options |= {"keepalive_timeout": IDLE_SECONDS, "lingering_time": LINGER_SECONDS, "access_log": None}
        runner = self._runner = web.AppRunner(app, logger=silent, shutdown_timeout=1.0, **options)
        await runner.setup()
        loop, server = asyncio.get_running_loop(), runner.server
        if server is None:
            raise RuntimeError("aiohttp made no server")
        self._listening = await loop.create_server(partial(self._accept, server, loop), host, port)
        for listening in self._listening.sockets:  # connections inherit the option
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_SECONDS * 1000))
        bound = self._listening.sockets[0].getsockname()
        return address_of(bound[0], bound[1])

    async def stop(self) -> None:
        """Close the connections. Waiting requests get no answer."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def heard(self, request: web.Request) -> None:
        """Note that a connection has sent a request."""
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        if request.transport is not None:
            self._keys[request.transport] = key_of(request)

    def _accept(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        """Accept a connection. A silent connection is closed later, because it would hold a file descriptor for
        ever."""
        connection = server()
        if len(server.connections) >= MAX_CONNECTIONS:
            keys = [self._keys.get(each.transport, "") for each in server.connections]
            self._cut(server.connections[keys.index(Counter(keys).most_common(1)[0][0])])
        self._silent[connection] = loop.call_later(FIRST_SECONDS, self._cut, connection)
        return connection

    def _cut(self, connection: RequestHandler) -> None:
        self._silent.pop(connection, None)
        if connection.transport is not None:
            connection.transport.abort()


def address_of(host: str, port: int) -> str:
    """The URL of a host's port, such as `http://[::1]:8400`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
