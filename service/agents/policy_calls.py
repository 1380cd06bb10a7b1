"""Handles calls of the policy over HTTP: reads the client's dialect, lets the session make the call, and answers.

    body -> CallRequest -> session.begin -> call -> CallAnswer -> JSON or server-sent events

The client gets no sampled token, and nothing derived from one, before the buffer has accepted the call's step. A client
that waits for a stream gets headers and comments.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import xxhash
from aiohttp import web

from service.agents.conversation_tree import AgentCall, PreparedCall
from service.agents.dialects.body import parse_body
from service.agents.dialects.chat import CHAT
from service.agents.dialects.dialect import MODEL, CallAnswer, CallRequest, Dialect, Refused
from service.agents.dialects.generate import GENERATE
from service.agents.dialects.messages import MESSAGES
from service.agents.dialects.responses import RESPONSES, with_items
from service.agents.requests import MARK_HEADER, STREAM, TOO_LARGE, Requests, is_connected, is_retry, role_named
from service.agents.session import Session

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 3.0
"""Seconds between two comments to a client that waits for a stream."""
COMMENT = b": the policy samples\n\n"
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": GENERATE,
}
"""The dialect of each path at which clients call the policy."""
COUNT_TOKENS = "/v1/messages/count_tokens"
NAMED = "/s/{session}"
"""Optional prefix of a path, which names the session."""
IGNORED_HEADER = "X-Baton-Ignored"
"""Header of an answer; its value names the fields of the request that had no effect."""
SAMPLE_HEADER = "X-Baton-Sample"
"""Header that distinguishes requests with equal bodies, so that each request gets an answer of its own."""
MAX_NOTED = 128
"""Maximum number of ignored fields that are logged. (Clients choose the names, so there may be any number.)"""


class PolicyCalls:
    """Answers all HTTP requests that call the policy, in all sessions."""

    def __init__(self, requests: Requests, named_roles: Sequence[str], structured: str) -> None:
        """`named_roles`: see `role_named`; `structured`: the setting `agents.structured`."""
        self._requests, self._named_roles, self._structured = requests, named_roles, structured
        self._noted: set[tuple[str, str]] = set()
        """Ignored fields that were logged, with their dialects."""
        self.answered: Counter[tuple[str, str]] = Counter()
        """Number of answered calls by (dialect, way). The way is a `How`: how the prompt was made; or `replayed`: an
        earlier call was answered again."""

    def add_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        """Add the routes of all dialects; each path begins with `prefix`."""
        for path, dialect in DIALECTS.items():
            router.add_post(prefix + path, partial(self._answer, dialect))

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        """Handle one call: read, begin, wait for the result, answer."""
        session = self._requests.session(request)
        known = session.n_steps
        calling, asked = await self._begin(dialect, request, session)
        self._note(dialect, asked.ignored)
        while (await asyncio.wait(calling, timeout=KEEP_ALIVE_SECONDS))[1]:
            if asked.stream:
                await (await _stream(request, asked)).write(COMMENT)
        if any(one.cancelled() for one in calling):
            session.check_open()
        calls = [one.result() for one in calling]
        self.answered.update((dialect.name, "replayed" if call.index < known else call.how) for call in calls)
        wants_pieces = asked.wants_ids or asked.wants_logprobs
        pieces = (session.tree.pieces(call) if wants_pieces else () for call in calls)
        first, *others = (CallAnswer(call, int(time.time()), of) for call, of in zip(calls, pieces, strict=True))
        response = await _write(request, dialect, asked, first._replace(others=others))
        for call in calls:
            call.delivered = call.delivered or is_connected(request)
            call.marks.add(request.headers.get(MARK_HEADER, ""))
            self._requests.undelivered += not call.delivered
        return response

    async def _begin(
        self, dialect: Dialect, request: web.Request, session: Session
    ) -> tuple[Sequence[asyncio.Future[AgentCall]], CallRequest]:
        """Begin the calls of a request; returns them, and the request without its prompt.

        Requests of one session begin their calls one after the other.
        """
        role = role_named(request, self._named_roles)

        def read(raw: bytes) -> tuple[CallRequest, PreparedCall, str]:
            body = parse_body(raw)
            asked = dialect.read(with_items(body, session.tree.named) if dialect is RESPONSES else body)
            if asked.forms and self._structured == "refuse":
                raise Refused(400, asked.forms[0], "the form of answers cannot be prescribed; see agents.structured")
            hidden = ("tools",) if asked.tools and not session.tree.shows_tools else ()
            ignored = tuple(dict.fromkeys((*asked.ignored, *asked.forms, *hidden)))
            asked = asked._replace(model=str(body.get("model") or MODEL), ignored=ignored)
            name = f"{dialect.name}/{xxhash.xxh3_128_hexdigest(raw)}"
            if of := request.headers.get(SAMPLE_HEADER):
                name += f"/{xxhash.xxh3_64_hexdigest(of.encode(errors='surrogateescape'))}"
            return asked, session.opened(asked)._replace(named=role), name

        try:
            async with self._requests.prompt(request, session, read) as (asked, opened, name):
                names = (f"{name}/{index}" if index else name for index in range(asked.n))
                repeated = is_retry(request), request.headers.get(MARK_HEADER, "")
                calls = [session.begin(asked, opened, sample, *repeated) for sample in names]
        except Refused as refused:
            if refused.status == TOO_LARGE:
                raise session.too_long(refused.reason) from refused
            raise
        return calls, asked._replace(messages=(), prompt=None)

    def _note(self, dialect: Dialect, ignored: Sequence[str]) -> None:
        """Log each ignored field once, up to `MAX_NOTED` fields."""
        new = [name for name in ignored if (dialect.name, name) not in self._noted]
        if new and len(self._noted) < MAX_NOTED:
            self._noted.update((dialect.name, name) for name in new)
            log.info("calls of dialect %s have fields that do not reach the policy: %s", dialect.name, ", ".join(new))


async def _write(request: web.Request, dialect: Dialect, asked: CallRequest, answer: CallAnswer) -> web.StreamResponse:
    """Write the answer; returns once the connection has taken all of it.

    Raises:
        ConnectionError: the client left.
    """
    response: web.StreamResponse
    if asked.stream:
        response = await _stream(request, asked)
        for frame in dialect.events(answer, asked):
            await response.write(frame)
    else:
        response = web.json_response(dialect.reply(answer, asked), headers=_headers(asked))
        await response.prepare(request)
    await response.write_eof()
    return response


async def _stream(request: web.Request, asked: CallRequest) -> web.StreamResponse:
    """The stream for a request's answer. The first call starts the stream."""
    if (stream := request.get(STREAM)) is None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_headers(asked)}
        stream = web.StreamResponse(headers=headers)
        await stream.prepare(request)
        request[STREAM] = stream
    return stream


def _headers(asked: CallRequest) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(asked.ignored)} if asked.ignored else {}


def dialect_of(path: str) -> Dialect:
    """The dialect in which a request for this path gets an error."""
    if path.startswith("/s/"):
        path = path[path.find("/", len("/s/")) :]
    return MESSAGES if path == COUNT_TOKENS else DIALECTS.get(path, CHAT)
