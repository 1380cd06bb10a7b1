"""Protects the hub's HTTP server from strangers who block it, or who read its answers through a user's browser."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import RequestHandler

MAX_CONNECTIONS = 128
"""Maximum number of simultaneous connections; a further connection replaces the oldest."""
CONNECTION_SECONDS = 30.0
"""Maximum duration of a connection, in seconds; each connection serves one request."""

OWN_NAMES = ("localhost", socket.gethostname().lower())
NOT_OWN = "This name is none of this host; use the host's own name, its address, or localhost.\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(server: web.Server, listening: socket.socket) -> asyncio.Server:
    """Serve as `web.TCPSite` does, with limits on the number and the duration of connections.

    A connection that never sends its request would otherwise hold a file descriptor for ever, and without free
    descriptors the server could not answer.
    """
    loop = asyncio.get_running_loop()

    def accept() -> asyncio.Protocol:
        if len(server.connections) >= MAX_CONNECTIONS:
            _cut(server.connections[0])
        connection = server()
        loop.call_later(CONNECTION_SECONDS, _cut, connection)
        return connection

    return await loop.create_server(accept, sock=listening)


def _cut(connection: RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


def for_own_names(configured: str) -> Middleware:
    """Return a middleware that answers only requests to this host, and one request per connection.

    This protects against DNS rebinding, with which the host name of a stranger's web page resolves to this machine. The
    page could then read the answers through the browser of somebody who has access. But the browser sends the
    stranger's host name as `Host`, never an address.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = host_name(request.host)
        own = name in (configured.lower(), *OWN_NAMES) or is_address(name)
        if not own and name != await asyncio.to_thread(full_name):
            return web.Response(status=421, text=NOT_OWN)
        response = await handler(request)
        response.force_close()
        return response

    return answer


@cache
def full_name() -> str:
    """Return this host's name with its domain; the first call may ask a name server."""
    return socket.getfqdn().lower()


def host_name(host: str) -> str:
    """Return the name in a `Host` header, in lower case; empty if the header is malformed.

    >>> [host_name(host) for host in ("Localhost:9400", "[::1]:9400", "10.0.0.7", "[")]
    ['localhost', '::1', '10.0.0.7', '']
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    """Return True if a name is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
