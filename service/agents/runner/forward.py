"""Forwards the connections of a command without a network to its endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import SplitResult, urlsplit

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
    """While the block runs, connections to `listener` reach the endpoint; at its end they are closed."""
    connections: set[asyncio.Task[None] | None] = set()
    endpoint = urlsplit(base_url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(task := asyncio.current_task())
        try:
            await _connect(endpoint, port_of(base_url), reader, writer)
        except OSError:
            pass  # one side has closed the connection: close the other side too
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, sock=listener)
    try:
        yield
    finally:
        server.close()
        left = [task for task in connections if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _connect(
    endpoint: SplitResult, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    there, to_there = await asyncio.open_connection(endpoint.hostname, port, ssl=endpoint.scheme == "https" or None)
    try:
        await asyncio.gather(_pump(reader, to_there), _pump(there, writer))
    finally:
        to_there.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        with suppress(OSError):  # the other side has closed
            writer.write_eof()
