"""The sessions of a generator, by their keys; only issued keys have an entry."""

from __future__ import annotations

import hmac
from collections import Counter
from hashlib import sha256
from pathlib import Path

from service.agents.dialects.dialect import Refused
from service.agents.ended_sessions import Ended, EndedSessions
from service.agents.session import Session


class Sessions:
    """Open sessions, and those that ended most recently."""

    def __init__(self, ended_file: Path | None = None) -> None:
        """`ended_file`: see `EndedSessions`."""
        self._open: dict[str, Session] = {}
        """By the digest of the key: how long a look-up takes then says nothing about the keys."""
        self._named: dict[str, Session] = {}
        self._ended = EndedSessions(ended_file)
        self.counts: Counter[str] = Counter()
        """Sessions that ended, by state."""

    def __len__(self) -> int:
        return len(self._open)

    def by_state(self) -> dict[str, int]:
        """Number of sessions by state; open sessions are `calling` (the client waits) or `idle` (the endpoint waits).

        `offered` ones wait for a worker that claims them.
        """
        open_ones = Counter[str](session.waits_for for session in self.open())
        return {"calling": 0, "idle": 0, **open_ones, **self.counts}

    def add(self, session: Session) -> None:
        """Add a session, so that clients can reach it; an ended session of the same name is forgotten."""
        self._ended.forget(session.name)
        self._open[_digest(session.key)] = self._named[session.name] = session

    def remove(self, session: Session) -> None:
        """Close a session, if it is open, and forget its tokens."""
        session.close()
        self.counts[session.state] += 1
        found = _digest(session.key)
        del self._open[found]
        self._named.pop(session.name, None)
        if self._ended.of(found) is None:
            self.finished(session, "")

    def open(self) -> list[Session]:
        """All sessions that have not ended."""
        return [session for session in self._open.values() if session.state == "open"]

    def by_name(self, name: str) -> Session:
        """The session of this name; it may have just ended.

        Raises:
            Refused: there is no session of this name.
        """
        if (session := self._named.get(name)) is None:
            raise Refused(404, None, "there is no open session of this name")
        return session

    def by_key(self, key: str) -> Session:
        """The session of this key; it may have just ended.

        Raises:
            Refused: 401 for an unknown key, 409 for one of a session that ended.
        """
        found = _digest(key)
        if (session := self._open.get(found)) is not None and hmac.compare_digest(session.key, key):
            return session
        if self._ended.of(found) is not None:
            raise Refused(409, None, "the session has ended")
        raise Refused(401, None, "the key is that of no session", "invalid_api_key")

    def finished(self, session: Session, body: str) -> None:
        """Note the digest of the body with which a client finishes a session; empty: the session is not finished."""
        self._ended.note(Ended(session.name, _digest(session.key), body))

    def finished_with(self, key: str, name: str | None = None) -> str:
        """The digest of the body that finished the session of this key, or of this name; empty if it was not
        finished."""
        ended = self._ended.of(_digest(key), name)
        return "" if ended is None else ended.body


def _digest(key: str) -> str:
    return sha256(key.encode(errors="surrogatepass")).hexdigest()
