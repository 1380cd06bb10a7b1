"""The port of the run's metrics service. It is bound as soon as it is chosen, so that no other run can take it."""

from __future__ import annotations

import errno
import socket

from service.config import MetricsConfig
from service.errors import UserError

DEFAULT_PORT = 9400
PORTS_TRIED = 100
"""Number of ports, beginning with `DEFAULT_PORT`, that are tried if no port is configured."""


def listening_socket(metrics: MetricsConfig, earlier: int | None = None) -> socket.socket:
    """A socket that already listens on the run's metrics port, so that no other run can take the port. `metrics.port`
    gives the port: a number; 0: any free port; None: the first free port from 9400 on. Unless the port is a fixed
    number, `earlier`, the port of this run's previous service, is tried first.

    Raises:
        UserError: the configured port is taken, or the host is not an address of this machine.
    """
    ports = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if metrics.port is None else [metrics.port]
    tried = [*ports] if earlier is None or metrics.port else [earlier, *ports]
    for port in tried:
        try:
            return _listening(metrics.host, port)
        except UnicodeError:
            raise UserError(f"metrics.host: {metrics.host!r:.80} is no name of a host") from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == tried[-1]:
                raise UserError(_bind_message(metrics.host, port, error)) from None
    raise ValueError("there is no port to try")


def _listening(host: str, port: int) -> socket.socket:
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
