"""The endpoint: agents call the policy over HTTP, each in its own dialect, with the key of its session.

    POST .../v1/chat/completions          the dialect reads the body, the session makes the call, the dialect answers
    Authorization: Bearer KEY             decides which session; `/s/NAME` in front of the path is for people

Nothing that derives from a sampled token is written before the buffer has accepted the call's step. While a client that
asked for a stream waits, it gets headers and comments.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from service.agents.conversation_tree import Call
from service.agents.dialects import chat, completions, messages, responses
from service.agents.dialects.body import HOSTED, Pinned, parse_body
from service.agents.dialects.types import Answer, Asked, Dialect, Finish, Refused
from service.agents.session import Session
from service.agents.sessions import Sessions
from service.agents.tokens import Generate, read_ids, tokenize
from service.rollout.chat.chat import Chat
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.env_guard import float_or_nan
from service.rollout.environment import Status

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Bytes of a request's body."""
BODY_SECONDS = 60.0
"""Seconds in which a client sends a request's body."""
FIRST_SECONDS = 30.0
"""Seconds in which a connection sends its first request."""
IDLE_SECONDS = 30.0
"""Seconds between two requests of a connection, before it is closed."""
KEEP_ALIVE_SECONDS = 3.0
"""Seconds between two comments to a client that waits for a stream."""
MOST_CONNECTIONS = 4096
"""Connections at a time; a further one is closed."""
COMMENT = b": the policy samples\n\n"
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/inference/v1/generate": Generate(),
}
"""By the path at which they are spoken."""
UNKNOWN_KEY = 401
"""Status of a request without the key of a session; its connection is closed."""
OTHER = "other"
COUNTED = frozenset(
    [*(f"{place}{name}" for place in ("", "sampling_params.") for name in Pinned.__struct_fields__)]
    + [f"tools.{kind}" for kind in HOSTED]
)
"""Names of fields that are counted; clients may send any others, each of which would be kept for ever."""
MODEL = "policy"
"""The name of the only model; requests may name any."""


class Endpoint:
    """Serves the sessions of one generator."""

    def __init__(self, sessions: Sessions, of_model: Chat, max_model_len: int) -> None:
        """`max_model_len`: most tokens of a prompt and its response."""
        self._sessions = sessions
        self._chat = of_model
        self._max_model_len = max_model_len
        self._silent: dict[Any, asyncio.TimerHandle] = {}
        """Connections that have sent no request yet, and when they are closed."""
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self.calls: Counter[tuple[str, str]] = Counter()
        """Answered calls by dialect and by how the prompt came about; `replayed`: an earlier call again."""
        self.refused: Counter[str] = Counter()
        """Refused requests by status."""
        self.ignored: Counter[str] = Counter()
        """Fields of requests that changed nothing; those of other names than `COUNTED` together as `OTHER`."""
        self.undelivered = 0
        """Answers whose client left."""

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address that clients call, such as `http://127.0.0.1:41234`."""
        # aiohttp's log may quote requests, and with them keys.
        runner = self._runner = web.AppRunner(
            self.application(),
            access_log=None,
            logger=_silent(),
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_SECONDS,
        )
        await runner.setup()
        loop, server = asyncio.get_running_loop(), runner.server
        if server is None:
            raise RuntimeError("aiohttp made no server")
        self._listening = await loop.create_server(partial(self._accept, server, loop), host, port)
        bound = self._listening.sockets[0].getsockname()
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        return f"http://{shown}:{bound[1]}"

    async def stop(self) -> None:
        """Close the connections; requests that wait are given up."""
        if self._listening is not None:
            self._listening.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._note_connection])
        for prefix in ("", "/s/{session}"):
            for path, dialect in DIALECTS.items():
                app.router.add_post(prefix + path, partial(self._answer, dialect))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", partial(self._plain, self._models))
            app.router.add_post(f"{prefix}/tokenize", partial(self._plain, self._tokenize))
            app.router.add_post(f"{prefix}/detokenize", partial(self._plain, self._detokenize))
        for verb in ("reward", "finish"):
            app.router.add_post(f"/rl/sessions/{{session}}/{verb}", partial(self._plain, partial(_end, verb)))
        return app

    # -- calls of the policy ------------------------------------------------------------------------------------------

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """One call: read, begin, wait for it, answer."""
        stream: web.StreamResponse | None = None
        try:
            session = self._sessions.by_key(_key(request))
            raw = await _read(request, session)
            body = parse_body(raw)
            asked = dialect.read(body)
            known = session.n_steps
            calling = session.begin(asked, f"{dialect.name}/{xxhash.xxh3_128_hexdigest(raw)}", _is_retry(request))
            while not (await asyncio.wait([calling], timeout=KEEP_ALIVE_SECONDS))[0]:
                if asked.stream:
                    stream = stream or await _begin_stream(request)
                    await stream.write(COMMENT)
            if calling.cancelled():
                session.check_open()
            call = calling.result()
            self.ignored.update(name if name in COUNTED else OTHER for name in asked.ignored)
            self.calls[dialect.name, "replayed" if call.index < known else call.how] += 1
            stream = await self._write(request, stream, dialect, asked, _answer_of(call, body))
            call.delivered = call.delivered or _is_connected(request)
            self.undelivered += not call.delivered
            return stream
        except Refused as refused:
            return await self._refuse(request, stream, dialect, refused)
        except ConnectionError:
            self.undelivered += 1
            return stream or web.Response()  # nobody reads it
        except Exception:  # a bug, or the engine's death: the client gets an answer in its dialect, not aiohttp's page
            log.exception("a call of dialect %s failed", dialect.name)
            return await self._refuse(request, stream, dialect, Refused(500, None, "the endpoint failed"))

    async def _write(
        self, request: web.Request, stream: web.StreamResponse | None, dialect: Dialect, asked: Asked, answer: Answer
    ) -> web.StreamResponse:
        """Write the answer, and return when all of it was given to the connection.

        Raises:
            ConnectionError: the client left.
        """
        if asked.stream:
            stream = stream or await _begin_stream(request)
            for frame in dialect.events(answer, asked):
                await stream.write(frame)
        else:
            stream = web.json_response(dialect.reply(answer, asked))
            await stream.prepare(request)
        await stream.write_eof()
        return stream

    async def _refuse(
        self, request: web.Request, stream: web.StreamResponse | None, dialect: Dialect, refused: Refused
    ) -> web.StreamResponse:
        """An error in the form of the dialect; as an event where a stream has begun."""
        self.refused[str(refused.status)] += 1
        if stream is None:
            return web.json_response(dialect.error(refused), status=refused.status)
        if _is_connected(request):
            await stream.write(dialect.error_event(refused))
        return stream

    # -- beside them --------------------------------------------------------------------------------------------------

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Tokens of the prompt that the same body would have as a call."""
        try:
            session = self._sessions.by_key(_key(request))
            asked = messages.read_to_count(parse_body(await _read(request, session)))
            return web.json_response({"input_tokens": len(session.opened(asked).prompt_ids)})
        except Refused as refused:
            return await self._refuse(request, None, messages, refused)

    async def _plain(
        self, answer: Callable[[Session, Mapping[str, Any]], dict[str, Any]], request: web.Request
    ) -> web.StreamResponse:
        """A request that makes no call."""
        try:
            session = self._sessions.by_key(_key(request))
            body = parse_body(await _read(request, session)) if request.method == "POST" else {}
            try:
                return web.json_response(answer(session, body))
            except MessagesRefused as refused:
                raise Refused(400, "messages", str(refused)) from refused
        except Refused as refused:
            return await self._refuse(request, None, Generate(), refused)

    def _models(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        model = {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "baton",
            "max_model_len": self._max_model_len,
        }
        return {"object": "list", "data": [model]}

    def _tokenize(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return tokenize(self._chat, body, self._max_model_len)

    def _detokenize(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        ids = read_ids("tokens", body.get("tokens"))
        return {"prompt": self._chat.text(ids, with_special=True)}

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> asyncio.Protocol:
        """A new connection; one that sends nothing would otherwise hold a file descriptor for ever."""
        connection = server()
        full = len(server.connections) >= MOST_CONNECTIONS
        self._silent[connection] = loop.call_later(0.0 if full else FIRST_SECONDS, self._cut, connection)
        return connection

    def _cut(self, connection: RequestHandler) -> None:
        del self._silent[connection]
        if connection.transport is not None:
            connection.transport.abort()

    @web.middleware
    async def _note_connection(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            response = await handler(request)
        except web.HTTPException as refused:  # no such path: no key was read
            refused.force_close()
            raise
        if response.status == UNKNOWN_KEY:
            response.force_close()
        return response


def _answer_of(call: Call, body: Mapping[str, Any]) -> Answer:
    finish: Finish = "tool_calls" if call.reply.calls else "length" if call.stop_reason == "length" else "stop"
    model = body.get("model")
    versions = tuple(call.response.versions.tolist())
    return Answer(call, model if isinstance(model, str) else MODEL, int(time.time()), call.n_prompt, finish, versions)


def _end(verb: str, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent says about its trajectory: its reward, or also that it has ended.

    Raises:
        Refused: the reward is no number.
    """
    reward, status = body.get("reward"), body.get("status", "ok")
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(float_or_nan(reward))):
        raise Refused(400, "reward", "is a finite number")
    if status not in get_args(Status):
        raise Refused(400, "status", f"is one of {', '.join(get_args(Status))}")
    if verb == "finish":
        session.finish(reward, status)
    else:
        session.posted = reward
    return {}


def _key(request: web.Request) -> str:
    """The key that a client sent, in the header of OpenAI's, Anthropic's or Google's clients; empty without one."""
    bearer = request.headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or ""


def _is_retry(request: web.Request) -> bool:
    """Whether the client says that it asks again; the clients of OpenAI and Anthropic do."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def _is_connected(request: web.Request) -> bool:
    return request.transport is not None and not request.transport.is_closing()


async def _read(request: web.Request, session: Session) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await request.read()
        session.check_size(len(raw))
        return raw
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(413, None, f"the body has more than {MAX_BODY_BYTES} bytes") from error
    except TimeoutError as error:
        raise Refused(408, None, f"the body did not come within {BODY_SECONDS:.0f} s") from error
    except web.RequestPayloadError as error:
        raise Refused(400, None, f"the body cannot be read: {error}") from error


async def _begin_stream(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    return stream


def _silent() -> logging.Logger:
    silent = logging.getLogger(f"{__name__}.http")
    silent.setLevel(logging.CRITICAL + 1)
    return silent
