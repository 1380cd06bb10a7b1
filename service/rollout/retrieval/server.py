"""The retrieval server: queries that arrive together are encoded together; refusals are answered as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections import deque
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from service.rollout.environment import is_text
from service.rollout.retrieval.retriever import Hit, Retriever

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Most connections that wait to be accepted: all trajectories may ask at once."""
MAX_BODY_BYTES = 1 << 20
"""Bytes of a request's body after decompression: 4 KiB for each of `MAX_QUERIES`."""
MAX_TOPK = 100
MAX_QUERIES = 256
MAX_BATCH = 128
"""Queries that are encoded at once."""


class _Request(NamedTuple):
    queries: list[str]
    topk: int
    answer: asyncio.Future[list[list[Hit]]]


class Batcher:
    """Collects the requests that arrive while the encoder is busy, and answers them in one batch."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._requests: deque[_Request] = deque()
        self._answering: asyncio.Task[None] | None = None

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """As `Retriever.search`."""
        request = _Request(queries, topk, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer_all())
        return await request.answer

    async def _answer_all(self) -> None:
        """Answer batch after batch until no request waits."""
        while self._requests:
            queries: list[str] = []
            batch: list[_Request] = []
            while self._requests and len(queries) < MAX_BATCH:
                request = self._requests.popleft()
                if not request.answer.done():  # else its connection closed; a client that hung up asks again
                    batch.append(request)
                    queries += request.queries
            if not batch:
                continue
            try:
                found = await asyncio.to_thread(self._retriever.search, queries, max(request.topk for request in batch))
            except Exception as error:  # noqa: BLE001 - each request answers with it; the server goes on
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            hits = iter(found)
            for request in batch:
                answer = [next(hits)[: request.topk] for _ in request.queries]
                if not request.answer.done():
                    request.answer.set_result(answer)


def serve(retriever: Retriever, listening: socket.socket, handle_signals: bool) -> None:
    """Answer at a socket; ends at a signal if `handle_signals`, which only the main thread may do."""
    web.run_app(
        application(retriever),
        sock=listening,
        backlog=BACKLOG,
        handle_signals=handle_signals,
        handler_cancellation=True,
        print=None,
    )


def application(retriever: Retriever, default_topk: int = 3) -> web.Application:
    """The server as an aiohttp application: `POST /retrieve` and `GET /healthz`.

    Its runner needs `handler_cancellation=True`, so that closing a connection cancels its request.
    """
    batcher = Batcher(retriever)

    async def retrieve(request: web.Request) -> web.Response:
        queries, topk, scored = _checked(await _json(request), default_topk)
        found = await batcher.search(queries, topk)
        return web.json_response({"result": [[_document(hit, scored) for hit in hits] for hits in found]})

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"passages": len(retriever.passages)})

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_reasons_as_json])
    app.add_routes([web.post("/retrieve", retrieve), web.get("/healthz", healthz)])
    return app


@web.middleware
async def _reasons_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as `{"error": reason}`, with the status and the other headers of the error."""
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge as error:
        reason = f"the body has more than {MAX_BODY_BYTES} bytes; ask in several requests"
        return web.json_response({"error": reason}, status=error.status)
    except web.HTTPException as error:
        error.text, error.content_type = json.dumps({"error": error.text}), "application/json"
        raise
    except Exception as error:
        log.exception("a search failed")
        return web.json_response({"error": f"the search failed: {type(error).__name__}: {error}"}, status=500)


async def _json(request: web.Request) -> Any:
    """The body as JSON, whatever its `Content-Type`: clients set it arbitrarily."""
    try:
        return await request.json()
    except (ValueError, LookupError, RecursionError) as error:  # no JSON, no such encoding, or nested too deep
        raise web.HTTPBadRequest(text=f"the body is no JSON: {error}") from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {error}") from error


def _checked(body: Any, default_topk: int) -> tuple[list[str], int, bool]:
    """The queries, the number of passages for each, and whether with scores; null means the default."""
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="give an object with query or queries")
    given = [body[name] for name in ("query", "queries") if body.get(name) is not None]
    if len(given) != 1:
        raise web.HTTPBadRequest(text="give either query or queries")
    queries = given if isinstance(given[0], str) else given[0]
    if not isinstance(queries, list) or not all(map(is_text, queries)):
        raise web.HTTPBadRequest(text="query is a text, queries a list of texts")
    if not 0 < len(queries) <= MAX_QUERIES:
        raise web.HTTPBadRequest(text=f"{len(queries)} queries; give 1 to {MAX_QUERIES}")
    topk = default_topk if body.get("topk") is None else body["topk"]
    if type(topk) is not int or not 0 < topk <= MAX_TOPK:
        raise web.HTTPBadRequest(text=f"topk {topk!r:.40} is none of 1 to {MAX_TOPK} passages")
    scored = False if body.get("return_scores") is None else body["return_scores"]
    if not isinstance(scored, bool):
        raise web.HTTPBadRequest(text=f"return_scores {scored!r:.40} is neither true nor false")
    return queries, topk, scored


def _document(hit: Hit, scored: bool) -> dict[str, Any]:
    document = hit.passage._asdict()
    return {"document": document, "score": hit.score} if scored else document
