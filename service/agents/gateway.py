"""One address for all agents of a run. The gateway passes each request on to the generator that holds the session.

    agent -- key of session 5-1-0 --> gateway -- GET /rl/sessions/5-1-0 --> generator-0: 401, generator-1: 200
                                              -- the request -------------> generator-1

A restarted gateway needs no stored state: a key contains the session's name, each generator announces that it serves,
and the gateway asks generators who holds a session. If no generator holds an open session, its requests wait.

the connection to the generator breaks     the same request goes to the next generator that holds the session
a part of the answer went to the client     the client's connection is closed
the session has ended, or was replaced     409
no generator for `WAIT_SECONDS`            503 with `Retry-After`
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from io import BytesIO

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict
from yarl import URL

from service.agents.dialects.dialect import Refused
from service.agents.listening import Listener
from service.agents.policy_calls import COMMENT, dialect_of
from service.agents.requests import (
    BODY_SECONDS,
    CALLS,
    MARK_HEADER,
    MAX_OPEN_BODIES,
    NO_ROOM,
    REFUSED_HEADER,
    ROOM_SECONDS,
    STREAM,
    cut,
    error_answer,
    is_connected,
    key_of,
)
from service.agents.server import CLOSING
from service.agents.session import MAX_BODY_BYTES
from service.agents.sessions import EVALUATION, name_of
from service.errors import in_one_line
from service.rollout.run_secret import RunSecret
from service.types import TrajectoryId

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""Seconds for which a generator is asked for sessions after its last announcement."""
WAIT_SECONDS = 120.0
"""Maximum seconds that a request waits for a generator to hold its session."""
LOOK_SECONDS = 0.2
"""Seconds between two searches for the holder of a session."""
PROBE_SECONDS = 5.0
"""Maximum seconds to wait until a generator answers whether it holds a session."""
MAX_BREAKS = 16
"""Number of times that a request's connection to a generator may break; then the answer is 503."""
ALL = ""
"""The key for all sessions together; no session has this name."""
MAX_HELD_BYTES = MAX_OPEN_BODIES * MAX_OPEN_BODIES * MAX_BODY_BYTES
"""Maximum bytes of the bodies of all requests in progress; one session may have 1 / `MAX_OPEN_BODIES` of them. A body
is kept until its request is answered, so that it can be sent again."""
MAX_HOLDERS = 1 << 14
"""Maximum number of sessions whose holder is remembered, and of those whose refused call is."""
HOP_HEADERS = frozenset(
    ("connection", "content-length", "date", "expect", "host", "keep-alive", "server", "te", "transfer-encoding")
)
"""Headers, in lower case, that are valid for one connection only, so they are not passed on."""
OWN_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp adds to a request if they are missing."""
IN_PARTS_BYTES = 1 << 20
"""Bodies of at least this many bytes are sent in parts, so that they do not hold up the event loop."""
KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * (ROOM_SECONDS + 10))),
)
"""Socket options that break the connection to a lost host. (A live generator may read nothing of a large body for
`ROOM_SECONDS`.)"""
HELD, UNKNOWN, ENDED = 200, 401, 409
"""HTTP statuses with which a generator answers about a session: it holds it; it never had it; the session ended."""

IsOpen = Callable[[TrajectoryId], Awaitable[bool]]
"""A function that returns whether a trajectory is open: unfinished, and replaced by no newer attempt."""


class Gateway:
    """Passes the requests of all agents on to the generators."""

    def __init__(self, secret: RunSecret, is_open: IsOpen, deadline: float) -> None:
        """`deadline`: maximum seconds of one call."""
        self._secret, self._is_open = secret, is_open
        self._listener = Listener()
        self._timeout = aiohttp.ClientTimeout(total=deadline, sock_connect=PROBE_SECONDS)
        self._generators: dict[str, tuple[str, float]] = {}
        """By the generator's name: its address, and the time of its last announcement."""
        self._holders: dict[str, str] = {}
        """By the session's name: the address of the generator that held it last."""
        self._looks: dict[str, asyncio.Task[str | None]] = {}
        """By the session's name: the search for its holder, which all its waiting requests share."""
        self._refused: dict[str, str] = {}
        """By the session's name: the newest refusal of a call by the gateway, until the session's holder knows it."""
        self._held: Counter[str] = Counter()
        """By the session's name: bytes of the bodies of its requests in progress. `ALL`: of all sessions."""
        self._http: aiohttp.ClientSession
        """Set by `start`."""
        self._began = 0.0
        """Time at which the gateway began to listen."""

    async def start(self, host: str, port: int) -> str:
        """Listen; returns the address."""
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=self._timeout)
        self._began = asyncio.get_running_loop().time()
        app = web.Application(middlewares=[self._answered])
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return await self._listener.start(app, host, port, handler_cancellation=True, auto_decompress=False)

    async def stop(self) -> None:
        """Close all connections."""
        await self._listener.stop()
        for look in self._looks.values():
            look.cancel()
        await self._http.close()

    def serves(self, generator: str, address: str) -> None:
        """Note that a generator serves its sessions at this address."""
        self._generators[generator] = address, asyncio.get_running_loop().time()

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._listener.heard(request)
        dialect = dialect_of(request.path)
        try:
            response = await handler(request)
        except Refused as refused:
            await self._tell(request, refused)
            response = await error_answer(request, dialect, refused)
        except web.HTTPException as unknown:  # a request without a path, as `OPTIONS *`
            response = await error_answer(request, dialect, Refused(unknown.status, None, "there is no such path"))
            response.force_close()
        except ConnectionError:  # the client has left, or cannot get the rest of its answer
            response = cut(request)
        except Exception:  # a bug
            log.exception("a request could not be passed on")
            response = await error_answer(request, dialect, Refused(500, None, "the gateway failed"))
        if response.status in CLOSING:
            response.force_close()
        return response

    async def _tell(self, request: web.Request, refused: Refused) -> None:
        """Tell the holder of a session of a call that the gateway refuses, before the agent knows it: an agent may take
        the refusal for an answer."""
        if refused.status in (UNKNOWN, ENDED) or not request.path.endswith(CALLS):
            return
        name = name_of(self._secret, key := key_of(request))
        self._refused[name] = f"{refused.status} {in_one_line(str(refused))[:200]}"
        await self._ask_all(name, key)
        if len(self._refused) > MAX_HOLDERS:
            del self._refused[next(iter(self._refused))]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on until a generator has answered it."""
        key = key_of(request)
        if not (name := name_of(self._secret, key)):
            raise Refused(401, None, "no session has this key", "invalid_api_key")
        parts = list[bytes]()
        try:
            await self._read(request, name, parts)
            parts[:] = [b"".join(parts)]
            return await self._answer(request, name, key, *parts)
        finally:
            size = sum(map(len, parts))
            for whose in (name, ALL):
                self._held[whose] -= size
                if not self._held[whose]:
                    del self._held[whose]

    async def _read(self, request: web.Request, name: str, parts: list[bytes]) -> None:
        """Read the body, as it was sent, into `parts`: at most one byte more than any session accepts.

        Raises:
            Refused: the body is late (408) or cannot be read (400), or there is no room for it (503).
        """
        left = MAX_BODY_BYTES + 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while left > 0 and (part := (await request.content.readany())[:left]):
                    of_session, of_all = self._held[name] + len(part), self._held[ALL] + len(part)
                    if of_session > MAX_HELD_BYTES // MAX_OPEN_BODIES or of_all > MAX_HELD_BYTES:
                        raise Refused(NO_ROOM, None, "bodies of other requests are in the way", "overloaded")
                    parts.append(part)
                    self._held[name], self._held[ALL] = of_session, of_all
                    left -= len(part)
        except TimeoutError as error:
            raise Refused(408, None, f"the body did not come within {BODY_SECONDS:.0f} s") from error
        except web.RequestPayloadError as error:
            raise Refused(400, None, f"the body cannot be read: {error}") from error

    async def _answer(self, request: web.Request, name: str, key: str, body: bytes) -> web.StreamResponse:
        headers = _of_both_ways(request.headers)
        headers[MARK_HEADER] = secrets.token_hex(8)
        for _ in range(MAX_BREAKS):
            address = self._holders.get(name) or await self._holder(name, key)
            try:
                if (response := await self._passed_on(request, address, headers, body)) is not None:
                    return response
            except aiohttp.ClientError as error:
                if not is_connected(request):
                    raise ConnectionResetError("the client has left") from error
            except TimeoutError as error:
                raise Refused(NO_ROOM, None, "the call took too long", "overloaded") from error
            if self._holders.get(name) == address:
                del self._holders[name]
            await asyncio.sleep(LOOK_SECONDS)
        raise Refused(NO_ROOM, None, "the generator was lost again and again; send the request again", "overloaded")

    async def _passed_on(
        self, request: web.Request, address: str, headers: CIMultiDict[str], body: bytes
    ) -> web.StreamResponse | None:
        """The answer of the generator at `address`, which was passed on to the client. None if the generator does not
        hold the session, or sent only comments.

        Raises:
            ConnectionError: the generator was lost after the client got a part of the answer.
        """
        url = URL(address + request.rel_url.raw_path_qs, encoded=True)
        data = BytesIO(body) if len(body) >= IN_PARTS_BYTES else body or None
        sending = self._http.request(request.method, url, data=data, headers=headers, skip_auto_headers=OWN_HEADERS)
        stream = request.get(STREAM)
        async with sending as answer:
            if answer.status == UNKNOWN:
                return None
            if answer.content_type != "text/event-stream":
                whole = await answer.read()
                if stream is not None:  # the client has a part of a stream
                    raise ConnectionResetError("the answer is no stream")
                return web.Response(body=whole, status=answer.status, headers=_of_both_ways(answer.headers))
            if stream is None:
                stream = web.StreamResponse(status=answer.status, headers=_of_both_ways(answer.headers))
                await stream.prepare(request)
                request[STREAM] = stream
            has_part = False
            try:
                async for data in answer.content.iter_any():
                    has_part = has_part or bool(data.replace(COMMENT, b""))
                    await stream.write(data)
            except aiohttp.ClientPayloadError as error:
                if has_part:
                    raise ConnectionResetError("the generator was lost within the answer") from error
            if not has_part:
                return None
            await stream.write_eof()
            return stream

    async def _holder(self, name: str, key: str) -> str:
        """The address of the generator that holds a session; waits while no generator does.

        Raises:
            Refused: 409 if the session has ended, 503 if no generator holds it for `WAIT_SECONDS`.
        """
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while True:
            if (look := self._looks.get(name)) is None:
                look = self._looks[name] = asyncio.ensure_future(self._look(name, key))
                look.add_done_callback(lambda done: self._looks.pop(name))
            if (held := await asyncio.shield(look)) is not None:
                return held
            if asyncio.get_running_loop().time() > deadline:
                reason = f"no generator has held the session for {WAIT_SECONDS:.0f} s; send the request again"
                raise Refused(NO_ROOM, None, reason, "overloaded")

    async def _look(self, name: str, key: str) -> str | None:
        """Ask all generators once which holds a session. Returns None, after a pause, if none holds it but the session
        is open.

        Raises:
            Refused: 409 if the session has ended.
        """
        now, found = asyncio.get_running_loop().time(), await self._ask_all(name, key)
        if (held := found.get(HELD)) is not None:
            self._holders[name] = held
            if len(self._holders) > MAX_HOLDERS:
                del self._holders[next(iter(self._holders))]
            return held
        is_evaluation = name.startswith(EVALUATION)  # only its generator knows the session
        is_over = not is_evaluation and not await self._is_open(TrajectoryId(*map(int, name.split("-"))))
        if ENDED in found and (is_over or is_evaluation):  # that generator answers a repeated end
            return found[ENDED]
        knows_all = 0 not in found and now > self._began + SILENT_SECONDS
        if is_over and knows_all:
            raise Refused(ENDED, None, "the session has ended")
        await asyncio.sleep(LOOK_SECONDS)
        return None

    async def _ask_all(self, name: str, key: str) -> dict[int, str]:
        """The addresses of the generators, by the status of their answers about a session."""
        now = asyncio.get_running_loop().time()
        addresses = [at for at, said in self._generators.values() if now - said < SILENT_SECONDS]
        statuses = await asyncio.gather(*(self._ask(address, name, key) for address in addresses))
        return dict(zip(statuses, addresses, strict=True))

    async def _ask(self, address: str, name: str, key: str) -> int:
        """The status of a generator's answer about a session; 0: it does not answer. The holder learns of a call that
        the gateway refused."""
        timeout, headers = aiohttp.ClientTimeout(total=PROBE_SECONDS), {"Authorization": f"Bearer {key}"}
        if told := self._refused.get(name):
            headers[REFUSED_HEADER] = told
        try:
            url = f"{address}/rl/sessions/{name}"
            async with self._http.get(url, headers=headers, timeout=timeout) as answer:
                if answer.status == HELD and self._refused.get(name) == told:
                    self._refused.pop(name, None)
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return 0


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket for a connection to a generator."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    for option in KEEP_ALIVE:
        made.setsockopt(*option)
    return made


def _of_both_ways(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that are passed on."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_HEADERS)
