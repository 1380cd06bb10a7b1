"""Reads the session's key and the body of each HTTP request, within limits of size and time.

    Authorization: Bearer KEY      selects the session; `/s/NAME` in front of the path is only for human readers
    key unknown, session ended     401, 409; the connection is closed
    body too large, or late        413, 408
    no room for the body           503 with `Retry-After`

A refused request gets an error in the form of its dialect, never aiohttp's page. The status is 503 because some clients
(Codex) do not retry after 429.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar
from weakref import WeakValueDictionary

from aiohttp import web

from service.agents.dialects.dialect import Dialect, Refused
from service.agents.session import MAX_LOGGED, Session
from service.agents.sessions import Sessions
from service.errors import in_one_line
from service.handoff.steps.values import Role

log = logging.getLogger(__name__)
Result = TypeVar("Result")

TOO_LARGE, NO_ROOM = 413, 503
"""HTTP statuses for a body that is too large, and for a body for which there is no room."""
MAX_END_BYTES = 1 << 20
"""Maximum bytes of a body that holds no prompt."""
BODY_SECONDS = 60.0
"""Seconds in which a client must send a request's body."""
LARGE_BYTES = 16 << 10
"""Bodies of at least this many bytes are parsed and rendered in a thread. Rendering a whole prompt of this size blocks
the event loop for about 8 ms; a thread costs up to 5 ms if other threads run."""
MAX_OPEN_BODIES = 8
"""Maximum number of large bodies that are handled at the same time. Reading, parsing and rendering a body takes several
times its bytes of memory."""
ROOM_SECONDS = 30.0
"""Maximum seconds that a large body waits for room."""
KEY_HEADERS = ("x-api-key", "api-key", "x-goog-api-key")
"""Headers in which clients of Anthropic, Azure and Google send the key."""
CALLS = ("/completions", "/responses", "/messages", "/generate")
"""Ends of the paths at which clients call a policy. Some clients call a path that the endpoint lacks."""
ROLE_HEADER = "X-Baton-Role"
MARK_HEADER = "X-Baton-Mark"
"""Header with the gateway's mark of a request. A repeated request has the same mark, so no second call is made."""
REFUSED_HEADER = "X-Baton-Refused"
"""Header with which the gateway tells of a call that it refused: the status and the reason."""
CONVERSATIONS = (Role.MAIN, Role.SUB, Role.AUX)
"""Roles that a conversation can have in every run."""
STREAM = web.RequestKey("stream", web.StreamResponse)
"""The stream of a request's answer, once it has begun."""
SESSION = web.RequestKey("session", Session)
"""The session of a request, once its key was read."""


class Requests:
    """Finds the session of each request, reads bodies, and answers refused requests."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.refused: Counter[str] = Counter()
        """Refused requests by status."""
        self.undelivered = 0
        """Number of answers whose client disconnected."""
        self._room = asyncio.Semaphore(MAX_OPEN_BODIES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks by key: a session may have one large body at a time, so that no session takes all the room."""

    def session(self, request: web.Request) -> Session:
        """The open session of the request's key.

        Raises:
            Refused: 401 for an unknown key, 409 for the key of a session that ended.
        """
        session = self.managed(request)
        session.check_open()
        return session

    def managed(self, request: web.Request) -> Session:
        """The session of the request's key. The session may have just ended.

        Raises:
            Refused: 401 for an unknown key, 409 for the key of a session that ended.
        """
        session = request[SESSION] = self.sessions.find(key_of(request))
        session.hear()
        return session

    @asynccontextmanager
    async def body(self, request: web.Request, most: int = MAX_END_BYTES) -> AsyncIterator[bytes]:
        """Yield the request's decompressed body, of up to `most` bytes. A large body holds its room until the block
        ends.

        Raises:
            Refused: the body is too large (413), is late (408) or cannot be read (400), or there is no room for it
            (503).
        """
        length = None if "content-encoding" in request.headers else request.content_length
        async with AsyncExitStack() as held:
            try:
                if length is None or length > LARGE_BYTES:
                    async with asyncio.timeout(ROOM_SECONDS):
                        await held.enter_async_context(self._turns.setdefault(key_of(request), asyncio.Lock()))
                        await held.enter_async_context(self._room)
            except TimeoutError as error:
                reason = f"other large bodies were in the way for {ROOM_SECONDS:.0f} s"
                raise Refused(NO_ROOM, None, reason, "overloaded") from error
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    raw = await request.clone(client_max_size=most).read()
            except TimeoutError as error:
                raise Refused(408, None, f"the body did not come within {BODY_SECONDS:.0f} s") from error
            except web.HTTPRequestEntityTooLarge as error:
                raise Refused(TOO_LARGE, None, f"the body has more than {most} bytes") from error
            except (web.RequestPayloadError, ValueError) as error:  # ValueError: it cannot be decompressed
                raise Refused(400, None, f"the body cannot be read: {error}") from error
            yield raw

    @asynccontextmanager
    async def prompt(
        self, request: web.Request, session: Session, read: Callable[[bytes], Result]
    ) -> AsyncIterator[Result]:
        """Yield the result of `read`, a function of the body; the body may be as large as a prompt. No other request
        adds a call to the session until the `with` block ends. `read` must not change any state: for a large body it
        runs in a thread, which goes on if the caller is cancelled.

        Raises:
            Refused: as in `body`.
        """
        async with self.body(request, session.most_body_bytes) as raw, session.opening:
            yield read(raw) if len(raw) < LARGE_BYTES else await asyncio.to_thread(read, raw)

    async def refuse(self, request: web.Request, dialect: Dialect, refused: Refused) -> web.StreamResponse:
        """Count and log a refused request; returns the answer to it."""
        self.refused[str(refused.status)] += 1
        if (session := request.get(SESSION)) is not None:
            client = request.headers.get("user-agent", "without a name")
            session.note_refusal(refused, client, is_call=request.path.endswith(CALLS))
        elif self.refused.total() <= MAX_LOGGED:
            log.warning("a request without a session is refused: %s %s", refused.status, in_one_line(str(refused)))
        return await error_answer(request, dialect, refused)


async def error_answer(request: web.Request, dialect: Dialect, refused: Refused) -> web.StreamResponse:
    """The answer to a refused request, in the form of the client's API. If a stream has begun, the error is sent as an
    event."""
    stream: web.StreamResponse | None = request.get(STREAM)
    if stream is None:
        headers = {"Retry-After": "1"} if refused.status == NO_ROOM else None
        return web.json_response(dialect.error(refused), status=refused.status, headers=headers)
    with suppress(ConnectionError):  # the client has left
        if is_connected(request):
            await stream.write(dialect.error_event(refused))
    return stream


def cut(request: web.Request) -> web.StreamResponse:
    """Close the connection of a request."""
    if request.transport is not None:
        request.transport.abort()
    return request.get(STREAM) or web.Response()


def is_retry(request: web.Request) -> bool:
    """Whether the client marks the request as a retry, as the clients of OpenAI and Anthropic do."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def role_named(request: web.Request, named: Sequence[str]) -> str | None:
    """The role that the client names for the conversation; None: it names none. `named`: the configured roles of the
    policy.

    Raises:
        Refused: there is no such role, or a client may not name it.
    """
    if (name := request.headers.get(ROLE_HEADER)) is None:
        return None
    if name not in (known := (*CONVERSATIONS, *named)):
        raise Refused(400, ROLE_HEADER, f"is one of {', '.join(known)}")
    return str(name)


def is_connected(request: web.Request) -> bool:
    """Whether the client is still connected."""
    return request.transport is not None and not request.transport.is_closing()


def key_of(request: web.Request) -> str:
    """The key that a client sent: in OpenAI's header, or in one of `KEY_HEADERS`; empty without a key."""
    bearer = request.headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return next((request.headers[name] for name in KEY_HEADERS if request.headers.get(name)), "")
