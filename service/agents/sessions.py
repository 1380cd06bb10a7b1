"""The sessions of a generator, by their keys; only issued keys have an entry."""

from __future__ import annotations

import hmac
from collections import Counter, OrderedDict
from hashlib import sha256

from service.agents.dialects.dialect import Refused
from service.agents.session import Session

MAX_ENDED = 4096
"""Sessions that ended and whose keys are still told from unknown ones."""


class Sessions:
    """Open sessions, and those that ended most recently."""

    def __init__(self) -> None:
        self._open: dict[bytes, Session] = {}
        """By the digest of the key: how long a look-up takes then says nothing about the keys."""
        self._named: dict[str, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
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
        """Add a session, so that clients can reach it."""
        self._open[_digest(session.key)] = self._named[session.name] = session

    def remove(self, session: Session) -> None:
        """Close a session, if it is open, and forget its tokens."""
        session.close()
        self.counts[session.state] += 1
        found = _digest(session.key)
        del self._open[found]
        self._named.pop(session.name, None)
        self._ended[found] = None
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

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
        if found in self._ended:
            raise Refused(409, None, "the session has ended")
        raise Refused(401, None, "the key is that of no session", "invalid_api_key")


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogatepass")).digest()
