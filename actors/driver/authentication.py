"""Refuses a Ray cluster without authentication, and keeps Ray's token readable for its user only."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from service.errors import UserError
from service.files import create_private


def keep_token_private(environment: Mapping[str, str], home: Path) -> None:
    """Make Ray's token file readable only by its user. If a new Ray will be started and the file is missing, write it,
    because Ray would write a file that everyone can read. `UserError` if the file cannot be protected, or if
    authentication is off: Ray listens on all interfaces, so anyone who reaches it could run code as this user."""
    if (mode := environment.get("RAY_AUTH_MODE", "token")).lower() != "token":
        raise UserError(
            f"RAY_AUTH_MODE={mode}: without a token, anybody who reaches the ports of Ray can run code there; unset "
            "it, or set it to token"
        )
    if environment.get("RAY_AUTH_TOKEN"):
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
