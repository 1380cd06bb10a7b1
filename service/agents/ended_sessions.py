"""The sessions that ended most recently, and the bodies with which clients finished them, also after a restart.

    finish(body) --noted--> journal --> 200         the same body again: 200; another one: 409

A body is noted before the trajectory's end is in the journal. If the generator dies between the two, the restarted
generator opens the session again, and forgets the body.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from service.files import write_atomic

log = logging.getLogger(__name__)

MAX_ENDED = 4096
"""Sessions that ended and are still known."""


class Ended(NamedTuple):
    """A session that ended."""

    name: str
    key: str
    """The digest of its key."""
    body: str
    """The digest of the body with which a client finished it; empty where none did."""


class EndedSessions:
    """Ended sessions, in memory and in a file that a restarted generator reads."""

    def __init__(self, file: Path | None) -> None:
        """`file`: has a line for each ended session; without it, or if this host lacks its folder, nothing outlives the
        process."""
        self._known: dict[str, Ended] = {}
        self._names: dict[str, str] = {}
        """By the digest of the key."""
        self._written = 0
        """Lines of the file."""
        self._file = file if file is not None and file.parent.is_dir() else None
        if self._file is not None and self._file.exists():
            for line in self._file.read_text("ascii", errors="replace").splitlines():
                if len(parts := line.split(" ")) == len(Ended._fields):  # else its writer was killed
                    self._keep(Ended(*parts))
            self._rewrite(self._file)

    def note(self, ended: Ended) -> None:
        """Note that a session ended."""
        self._keep(ended)
        try:
            if self._file is not None:
                with self._file.open("a", encoding="ascii") as file:
                    file.write(_line(ended))
                self._written += 1
                if self._written > 2 * MAX_ENDED:
                    self._rewrite(self._file)
        except OSError as error:
            log.warning("%s: %s; after a restart, repeated requests of sessions get 404", self._file, error)
            self._file = None

    def forget(self, name: str) -> None:
        """Forget a session, because it is open again."""
        if (ended := self._known.pop(name, None)) is not None:
            del self._names[ended.key]

    def of(self, key: str, name: str | None = None) -> Ended | None:
        """The ended session of this name or, without a name, with this digest of its key; None if it is not known."""
        return self._known.get(self._names.get(key, "") if name is None else name)

    def _rewrite(self, file: Path) -> None:
        """Rewrite the file, without the sessions that are no longer known."""
        write_atomic(file, "".join(map(_line, self._known.values())))
        self._written = len(self._known)

    def _keep(self, ended: Ended) -> None:
        self.forget(ended.name)
        self._known[ended.name], self._names[ended.key] = ended, ended.name
        if len(self._known) > MAX_ENDED:
            self.forget(next(iter(self._known)))


def _line(ended: Ended) -> str:
    return f"{' '.join(ended)}\n"
