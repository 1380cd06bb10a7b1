"""The port of the run's metrics service, chosen and checked before anything starts."""

from __future__ import annotations

import errno
import socket

from service.config import MetricsConfig
from service.errors import UserError

DEFAULT_PORT = 9400
PORTS_TRIED = 100
"""Ports from `DEFAULT_PORT` on that are tried where none is configured."""


def with_free_port(metrics: MetricsConfig) -> MetricsConfig:
    """The settings with a free port: the configured one; for 0, any; for None, the first free one from 9400 on.

    A fixed port gives a restarted metrics service the same address.

    Raises:
        UserError: the configured port is taken, or the host is not an address of this machine.
    """
    host, wanted = metrics.host, metrics.port
    last = DEFAULT_PORT + PORTS_TRIED - 1
    for candidate in range(DEFAULT_PORT, last + 1) if wanted is None else [wanted]:
        try:
            port = _bound(host, candidate)
        except UnicodeError:
            raise UserError(f"metrics.host: {host!r:.80} is no name of a host") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE or candidate == (last if wanted is None else wanted):
                raise UserError(bind_message(host, candidate, error)) from None
        else:
            break
    return metrics.model_copy(update={"port": port})


def _bound(host: str, port: int) -> int:
    """The port on which a server can listen; raises OSError if it cannot."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        # As in asyncio's servers: lingering connections of the previous server do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])


def bind_message(host: str, port: int, error: OSError) -> str:
    """One line with the reason why a server cannot listen."""
    if error.errno == errno.EADDRINUSE:
        return f"metrics.port: port {port} on {host} is in use; choose another, 0 for any free one, or leave it unset"
    if error.errno == errno.EACCES:
        return f"metrics.port: port {port} on {host} may not be opened by this user; choose one above 1023"
    return f"metrics.host: cannot listen on {host}:{port}: {error.strerror or error}"
