"""The sessions of a generator by their keys: the open sessions, and the sessions that ended last. A restarted generator
still knows the latter.

    finish(body) --> trajectory's end in the journal --> note the body in the file --> 200
    finish with the noted body again: 200; with another body: 409

If the generator dies before the note is in the file, the next generator opens the session again. It does not if the
buffer has the trajectory's end, or gave the trajectory up. Then no generator knows the session: all answer 401, and the
gateway answers 409.
"""

from __future__ import annotations

import hmac
import logging
from base64 import urlsafe_b64encode
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from service.agents.dialects.dialect import Refused
from service.agents.session import Session
from service.files import write_atomic
from service.rollout.run_secret import RunSecret

log = logging.getLogger(__name__)

KEY_BYTES = 16
EVALUATION = "eval-"
"""Names of an evaluation's sessions begin with it. The buffer does not know these sessions."""
MAX_ENDED = 4096
"""Maximum number of ended sessions that are remembered."""


class EndedSession(NamedTuple):
    """A session that ended, as a line of the file of ended sessions stores it."""

    name: str
    key: str
    """The digest of the session's key."""
    body: str
    """The digest of the body of the request that finished the session; empty if no request did."""


class Sessions:
    """The open sessions, and the sessions that ended last. A key that was never issued has no entry."""

    def __init__(self, file: Path | None = None) -> None:
        """`file`: the file of ended sessions, with one line for each. Without a file, or if the file's folder is not on
        this host, ended sessions are forgotten when the process ends."""
        self._open: dict[str, Session] = {}
        """Open sessions by name."""
        self._ended: dict[str, EndedSession] = {}
        self._names: dict[str, str] = {}
        """Names by the digest of the key, so that the duration of a look-up reveals nothing about the keys."""
        self.counts: Counter[str] = Counter()
        """Number of sessions that ended, by state."""
        self._lines = 0
        """Number of lines in the file."""
        self._file = file if file is not None and file.parent.is_dir() else None
        if self._file is not None and self._file.exists():
            for line in self._file.read_text("ascii", errors="replace").splitlines():
                if len(parts := line.split(" ")) == len(EndedSession._fields):  # else the writer of the line was killed
                    self._keep(EndedSession(*parts))
            self._rewrite(self._file)

    def __len__(self) -> int:
        return len(self._open)

    def by_state(self) -> dict[str, int]:
        """Number of sessions by state, including the sessions that have ended.

        An open session is `calling` (its client waits for the policy) or `idle` (the endpoint waits for the next
        request).
        """
        open_ones = Counter[str](session.waits_for for session in self.open())
        return {"calling": 0, "idle": 0, **open_ones, **self.counts}

    def oldest(self) -> dict[str, float]:
        """The age in seconds of the oldest open session in each state of `by_state`."""
        ages = [(session.waits_for, session.age) for session in self.open()]
        return {state: max((age for of, age in ages if of == state), default=0.0) for state in ("calling", "idle")}

    def add(self, session: Session) -> None:
        """Add a session, so that clients can reach it; an ended session of the same name is forgotten."""
        self._forget(session.name)
        self._open[session.name] = session
        self._names[_digest(session.key)] = session.name

    def remove(self, session: Session) -> None:
        """Close a session, if it is open, and remove it with its tokens. Remember its end, except if another generator
        continues it; and the digest of the body that finished it, if the buffer has recorded the end."""
        session.close()
        self.counts[session.state] += 1
        del self._open[session.name]
        is_recorded = not session.recorded.cancel() and session.recorded.result()
        if is_recorded or not session.moves:
            self.finished(session, self.finished_with(session.key) if is_recorded else "")

    def open(self) -> list[Session]:
        """All sessions that have not ended."""
        return [session for session in self._open.values() if session.state == "open"]

    def find(self, key: str) -> Session:
        """The session with this key. It may have ended a moment ago.

        Raises:
            Refused: 401 for an unknown key, 409 for the key of a session that ended.
        """
        found = self._names.get(_digest(key), "")
        session = self._open.get(found)
        if session is not None and hmac.compare_digest(session.key, key):
            return session
        if found in self._ended:
            raise Refused(409, None, "the session has ended")
        raise Refused(401, None, "no session has this key", "invalid_api_key")

    def asked(self, session: Session, body: str) -> None:
        """Remember, until the session is removed, the digest of the body with which a client finishes it."""
        self._keep(EndedSession(session.name, _digest(session.key), body))

    def finished(self, session: Session, body: str) -> None:
        """Record that a session has ended. `body`: the digest of the body with which a client finished it; empty if no
        client did."""
        ended = EndedSession(session.name, _digest(session.key), body)
        self._keep(ended)
        try:
            if self._file is not None:
                with self._file.open("a", encoding="ascii") as file:
                    file.write(_line(ended))
                self._lines += 1
                if self._lines > 2 * MAX_ENDED:
                    self._rewrite(self._file)
        except OSError as error:
            log.warning("%s: %s; after a restart, repeated requests of sessions get 401", self._file, error)
            self._file = None

    def finished_with(self, key: str) -> str:
        """The digest of the body with which a client finished the session with this key; empty if no client did."""
        ended = self._ended.get(self._names.get(_digest(key), ""))
        return "" if ended is None else ended.body

    def _keep(self, ended: EndedSession) -> None:
        self._forget(ended.name)
        self._ended[ended.name], self._names[ended.key] = ended, ended.name
        if len(self._ended) > MAX_ENDED:
            self._forget(next(iter(self._ended)))

    def _forget(self, name: str) -> None:
        if (ended := self._ended.pop(name, None)) is not None and name not in self._open:
            del self._names[ended.key]

    def _rewrite(self, file: Path) -> None:
        """Rewrite the file, without the sessions that are no longer known."""
        write_atomic(file, "".join(map(_line, self._ended.values())))
        self._lines = len(self._ended)


def session_key(secret: RunSecret, name: str) -> str:
    """The key of the session with this name: the name, and its HMAC under the run's secret."""
    made = hmac.digest(secret.value, name.encode(errors="surrogatepass"), "sha256")[:KEY_BYTES]
    return f"{name}.{urlsafe_b64encode(made).rstrip(b'=').decode()}"


def name_of(secret: RunSecret, key: str) -> str:
    """The name of the session with this key; empty if it is no key of this run."""
    name = key.rpartition(".")[0]
    sent, made = (each.encode(errors="surrogatepass") for each in (key, session_key(secret, name)))
    return name if hmac.compare_digest(sent, made) else ""


def _digest(key: str) -> str:
    return sha256(key.encode(errors="surrogatepass")).hexdigest()


def _line(ended: EndedSession) -> str:
    return f"{' '.join(ended)}\n"
