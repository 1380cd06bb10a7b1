"""Protects the hub's HTTP server from web pages that read its answers through a user's browser."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

OWN_NAMES = ("localhost", socket.gethostname().lower())
NOT_OWN = "This name is none of this host; use the host's own name, its address, or localhost.\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def for_own_names(configured: str) -> Middleware:
    """Return a middleware that answers only requests whose `Host` is an address or a name of this host.

    This protects against DNS rebinding, with which the host name of a stranger's web page resolves to this machine. The
    browser sends the stranger's host name as `Host`, never an address.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = host_name(request.host)
        is_own = name in (configured.lower(), *OWN_NAMES) or _is_address(name)
        if is_own or name == await asyncio.to_thread(full_name):
            return await handler(request)
        return web.Response(status=421, text=NOT_OWN)

    return answer


@cache
def full_name() -> str:
    """Return this host's name with its domain; the first call may ask a name server."""
    return socket.getfqdn().lower()


def host_name(host: str) -> str:
    """Return the name in a `Host` header, in lower case; empty if the header is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
