"""The port of the metrics hub. It is bound as soon as it is chosen, so that no other run can take it. Web pages in a
user's browser cannot read it."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from service.config import MetricsConfig
from service.errors import UserError

DEFAULT_PORT = 9400
PORTS_TRIED = 100
"""Number of ports, beginning with `DEFAULT_PORT`, that are tried if no port is configured."""


def listening_socket(metrics: MetricsConfig, earlier: int | None = None) -> socket.socket:
    """A socket that already listens on the run's metrics port, so that no other run can take the port. `metrics.port`:
    a fixed number; 0: any free port; None: the first free port from 9400 on. `earlier`: the port of this run's previous
    service; if the number is not fixed, it is tried first.

    Raises:
        UserError: the configured port is taken, or the host is not an address of this machine.
    """
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if metrics.port is None else [metrics.port]
    tried = [*ports] if earlier is None or metrics.port else [earlier, *ports]
    for port in tried:
        try:
            return listening_at(metrics.host, port)
        except UnicodeError:
            raise UserError(f"metrics.host: {metrics.host!r:.80} is no name of a host") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == tried[-1]:
                raise UserError(_bind_message(metrics.host, port, error)) from None
    raise ValueError("there is no port to try")


def listening_at(host: str, port: int) -> socket.socket:
    """A listening socket at the host's first address, an IPv4 address if there is one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return socket.create_server(address[:2], family=family)


def _bind_message(host: str, port: int, error: OSError) -> str:
    """Say in one line why a server cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return f"metrics.port: port {port} on {host} is in use; choose another, 0 for any free one, or leave it unset"
    if error.errno == errno.EACCES:
        return f"metrics.port: port {port} on {host} may not be opened by this user; choose one above 1023"
    return f"metrics.host: cannot listen on {host}:{port}: {error.strerror or error}"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def for_own_names(configured: str) -> Middleware:
    """Return a middleware that answers only requests whose `Host` is an address or a name of this host.

    This protects against DNS rebinding: the host name of a stranger's web page resolves to this machine. The browser
    then sends the stranger's host name as `Host`, and never an address.
    """
    own = {configured.lower(), "localhost", socket.gethostname().lower()}

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (name := _named(request.host)) is None or name in own or name == await asyncio.to_thread(full_name):
            return await handler(request)
        return web.Response(status=421, text="This name is none of this host; use its own name, or an address.\n")

    return answer


@cache
def full_name() -> str:
    """Return this host's name with its domain; the first call may ask a name server."""
    return socket.getfqdn().lower()


def _named(host: str) -> str | None:
    """The name in a `Host` header, in lower case; empty if the header is malformed, None if it has an address."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
    try:
        ip_address(name)
    except ValueError:
        return name
    return None
