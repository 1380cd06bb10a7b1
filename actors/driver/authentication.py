"""Refuses a Ray cluster without authentication, and keeps Ray's token readable for its user only."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from service.errors import UserError
from service.files import create_private

HERE = ("", "local", "auto", "localhost", "127.0.0.1", "::1")
"""Hosts in RAY_ADDRESS that mean this machine."""


def refuse_open_ray(environment: Mapping[str, str], insecure_local: bool) -> None:
    """Refuse to run without authentication.

    Ray's processes listen on all interfaces; without the token, anybody who reaches them can run code as this user.

    Raises:
        UserError: authentication is off, unless run.insecure_local is set and Ray is on this machine.
    """
    mode = environment.get("RAY_AUTH_MODE", "token")
    if mode.lower() == "token":
        return
    if not insecure_local:
        raise UserError(
            f"RAY_AUTH_MODE={mode}: without a token, anybody who reaches this machine's ports "
            "can run code on it; unset it, or set run.insecure_local=true on a machine that nobody else reaches"
        )
    address = environment.get("RAY_ADDRESS", "")
    if _host(address) not in HERE:
        raise UserError(
            f"run.insecure_local: RAY_ADDRESS={address} is not this machine, and RAY_AUTH_MODE={mode} lets anybody "
            "in the network run code there; set RAY_AUTH_MODE=token"
        )


def _host(address: str) -> str:
    """Return the host in a RAY_ADDRESS.

    >>> [_host(address) for address in ("ray://head:10001", "127.0.0.1:6379", "[::1]:6379", "local")]
    ['head', '127.0.0.1', '::1', 'local']
    """
    rest = address.rpartition("//")[2]
    return rest[1 : rest.index("]")] if rest.startswith("[") and "]" in rest else rest.partition(":")[0]


def keep_token_private(environment: Mapping[str, str], home: Path) -> None:
    """Make Ray's token file readable only by its user.

    If a new Ray will be started and the default file is missing, write it first, because the file that Ray would write
    is readable by everyone.

    Raises:
        UserError: the file cannot be written.
    """
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token" or environment.get("RAY_AUTH_TOKEN"):
        return
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    file = Path(named) if named else home / ".ray" / "auth_token"
    try:
        if not named and not file.exists() and not environment.get("RAY_ADDRESS"):
            create_private(file, secrets.token_hex(32))
        if file.exists() and file.stat().st_uid == os.getuid() and file.stat().st_mode & 0o077:
            file.chmod(0o600)
    except OSError as error:
        raise UserError(f"{file}: Ray's token cannot be kept there: {error.strerror}; set RAY_AUTH_TOKEN") from None
