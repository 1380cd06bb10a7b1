"""HTTP requests to addresses outside of the run: adds the key's header, and limits the size of answers."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from service.errors import UserError


def key_header(setting: str, file: Path | None) -> dict[str, str]:
    """The HTTP headers with the key that is read from a file; no headers without a file.

    Raises:
        UserError: the file cannot be read, or contains no key.
    """
    if file is None:
        return {}
    try:
        key = file.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{setting}: {file} cannot be read as text of ASCII: {error}") from error
    if not key or not key.isprintable():
        raise UserError(f"{setting}: {file} holds no key; a key is one line of printable characters")
    return {"Authorization": f"Bearer {key}"}


async def whole_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """The whole body of a response; None if it has more than `most_bytes` bytes."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            return None
    return bytes(body)
