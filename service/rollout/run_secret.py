"""The secret of a run, from which the keys of its agents' sessions are derived.

Generators derive the keys again instead of storing them. So a restarted generator, on any node, accepts the same keys.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import NamedTuple

from service.errors import UserError
from service.files import create_private

SECRET_FILE = "session_secret"
"""File of the secret in the run folder; only its user can read it."""
SECRET_BYTES = 32


class RunSecret(NamedTuple):
    """The secret of a run; it is never written to a log."""

    value: bytes
    run: Path | None = None
    """The run's folder, in which generators record the sessions that ended; None: they record nothing."""

    def __repr__(self) -> str:
        return "RunSecret"


def new_secret() -> RunSecret:
    """A secret that only this process knows."""
    return RunSecret(secrets.token_bytes(SECRET_BYTES))


def run_secret(run: Path) -> RunSecret:
    """The secret of a run, which is stored in the run's folder.

    Raises:
        UserError: the file does not contain a secret.
    """
    file = run / SECRET_FILE
    create_private(file, secrets.token_hex(SECRET_BYTES))
    try:
        value = bytes.fromhex(file.read_text("ascii"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no secret of a run can be read; remove it, which ends open sessions") from error
    if len(value) != SECRET_BYTES:
        raise UserError(f"{file}: is no secret of a run; remove the file (this ends open sessions)")
    return RunSecret(value, run)
