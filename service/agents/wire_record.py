"""A proxy in front of an endpoint that records what both sides send, without keys, for bug reports."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from pathlib import Path

SECRETS = re.compile(rb"(?im)^((?:proxy-)?authorization|(?:x-)?(?:goog-)?api-key|cookie):[^\r\n]*")


async def record_wire(endpoint: str, key: str, file: Path) -> str:
    """Listen on loopback in front of an endpoint; returns the address.

    A line of `file` is a connection: what the client sent, and what it received. `key` is replaced wherever it stands.
    """
    host, port = endpoint.removeprefix("http://").rsplit(":", 1)

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(host, int(port))
        kept = bytearray(), bytearray()
        with suppress(asyncio.CancelledError):  # the trial ends before its client leaves: what was said is kept too
            await asyncio.gather(_pump(reader, to_writer, kept[0]), _pump(to_reader, writer, kept[1]))
        told = (
            SECRETS.sub(rb"\1: [key]", bytes(one).replace(key.encode(), b"[key]")).decode(errors="replace")
            for one in kept
        )
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(dict(zip(("sent", "received"), told, strict=True))) + "\n")

    server = await asyncio.start_server(passed_on, "127.0.0.1", 0)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    """Forward and record all data until one side closes the connection."""
    try:
        while data := await reader.read(1 << 16):
            kept += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # the other direction is kept too
    finally:
        writer.close()
