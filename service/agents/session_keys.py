"""The keys of a run's agents: one per session, derived from the run's secret, and one for the workers.

    secret of the run (a file that only its user reads) --HMAC(name of the session)--> the session's key

So a restarted generator, on any node, accepts the same keys without having stored them.
"""

from __future__ import annotations

import hmac
import secrets
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import NamedTuple

from service.config.rollout import AgentsConfig
from service.errors import UserError
from service.files import create_private

SECRET_FILE = "session_secret"
"""File of the secret in the run folder; only its user can read it."""
SECRET_BYTES, KEY_BYTES = 32, 16
WORKER_KEY = "BATON_WORKER_KEY"
"""Environment variable with the worker key, which a run and `baton agent-worker` read."""
MIN_WORKER_KEY = 16
"""Minimum number of characters of a worker key."""


class Keys(NamedTuple):
    """Makes and checks keys; the keys are never written to a log."""

    secret: bytes
    worker: str = ""
    """The key of the workers; empty: no worker may claim sessions."""
    run: Path | None = None
    """The run's folder, in which generators note the sessions that ended; None: they note nothing."""

    def __repr__(self) -> str:
        return "Keys"

    def of(self, session: str) -> str:
        """The key of the session with this name."""
        made = hmac.digest(self.secret, session.encode(), "sha256")[:KEY_BYTES]
        return urlsafe_b64encode(made).rstrip(b"=").decode()

    def is_worker(self, key: str) -> bool:
        """Whether this is the key of the workers."""
        return bool(self.worker) and hmac.compare_digest(self.worker.encode(), key.encode(errors="surrogatepass"))


def run_keys(run: Path, agents: AgentsConfig, from_environment: str, needs_worker: bool) -> Keys:
    """The keys of a run, whose secret is stored in the run's folder; see `worker_key` for the other arguments.

    Raises:
        UserError: a file does not contain a key, or workers are expected and there is no key for them.
    """
    worker = worker_key(agents.worker_key_file, from_environment, needs_worker)
    file = run / SECRET_FILE
    create_private(file, secrets.token_hex(SECRET_BYTES))
    try:
        secret = bytes.fromhex(file.read_text("ascii"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: no secret of a run can be read there; remove it, which ends open sessions") from error
    if len(secret) != SECRET_BYTES:
        raise UserError(f"{file}: is no secret of a run; remove it, which ends open sessions")
    return Keys(secret, worker, run)


def worker_key(file: Path | None, from_environment: str, is_needed: bool) -> str:
    """The key of the workers; empty if no worker may claim sessions.

    `file`: `agents.worker_key_file`, which overrides the key `from_environment`; `is_needed`: workers are expected.

    Raises:
        UserError: the file or the variable does not contain a key, or a needed key is missing.
    """
    where, key = WORKER_KEY, from_environment
    if file is not None:
        where = f"agents.worker_key_file: {file}"
        try:
            key = file.read_text("ascii").strip()
        except (OSError, ValueError) as error:
            raise UserError(f"{where}: cannot be read as text of ASCII: {error}") from error
        if not key:
            raise UserError(f"{where}: is empty")
    if key and (len(key) < MIN_WORKER_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise UserError(f"{where}: a worker key has at least {MIN_WORKER_KEY} printable characters and no spaces")
    if is_needed and not key:
        raise UserError(
            f"env.workers: outside needs a worker key; give agents.worker_key_file, or set {WORKER_KEY} "
            f"(such as by {WORKER_KEY}=$(openssl rand -hex 16))"
        )
    return key
