"""Forwards connections to an endpoint, for a command without a network or a client whose traffic is recorded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

CHUNK = 1 << 16
PORTS = {"http": 80, "https": 443}


def port_of(base_url: str) -> int:
    """The port of an endpoint's address."""
    parts = urlsplit(base_url)
    return parts.port or PORTS[parts.scheme]


def on_loopback(base_url: str) -> str:
    """The address of an endpoint as seen by a command behind the forwarded port, without TLS.

    >>> on_loopback("https://train.example.org/s/812/v1")
    'http://127.0.0.1:443/s/812/v1'
    """
    return urlsplit(base_url)._replace(scheme="http", netloc=f"127.0.0.1:{port_of(base_url)}").geturl()


@asynccontextmanager
async def forwarded(listener: socket.socket, base_url: str) -> AsyncIterator[None]:
    """Forward each connection that `listener` accepts to the endpoint at `base_url`, until the `with` block ends; then
    close the connections."""
    connections: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(task := asyncio.current_task())
        try:
            await forward(reader, writer, base_url)
        finally:
            connections.discard(task)

    server = await asyncio.start_server(serve, sock=listener)
    try:
        yield
    finally:
        server.close()
        left = [task for task in connections if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    base_url: str,
    sent: bytearray | None = None,
    received: bytearray | None = None,
) -> None:
    """Forward a client's connection to an endpoint until both have sent everything, or one of the two breaks the
    connection.

    `sent` gets the bytes that the client sent, and `received` the bytes that it received.
    """
    endpoint = urlsplit(base_url)
    try:
        tls = endpoint.scheme == "https" or None
        there, to_there = await asyncio.open_connection(endpoint.hostname, port_of(base_url), ssl=tls)
        try:
            await asyncio.gather(_pump(reader, to_there, sent), _pump(there, writer, received))
        finally:
            to_there.close()
    except OSError:
        pass  # one side has closed the connection: close the other side too
    finally:
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
    while data := await reader.read(CHUNK):
        if kept is not None:
            kept += data
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        with suppress(OSError):  # the other side has closed
            writer.write_eof()
