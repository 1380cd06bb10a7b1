"""The retrieval server: questions that arrive together are encoded together, and what is refused is told as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from service.rollout.environment import is_text
from service.rollout.retrieval.index import Found, Retriever

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that wait to be accepted, at most: all trajectories may ask at once."""
MAX_BODY_BYTES = 1 << 20
"""Bytes of a question's body, unpacked where it came compressed: 4 KiB for each of `MAX_QUERIES`."""
MAX_TOPK = 100
MAX_QUERIES = 256
MAX_BATCH = 128
"""Questions that are encoded at once."""


class _Asked(NamedTuple):
    queries: list[str]
    topk: int
    answer: asyncio.Future[list[list[Found]]]


class Batcher:
    """Gathers what is asked while the encoder is busy, and answers it at once."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._asked: asyncio.Queue[_Asked] = asyncio.Queue()

    async def search(self, queries: list[str], topk: int) -> list[list[Found]]:
        """As `Retriever.search`."""
        asked = _Asked(queries, topk, asyncio.get_running_loop().create_future())
        self._asked.put_nowait(asked)
        return await asked.answer

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            batch = [await self._asked.get()]
            while not self._asked.empty() and sum(len(asked.queries) for asked in batch) < MAX_BATCH:
                batch.append(self._asked.get_nowait())
            # Whoever waited too long and hung up asks again: what nobody waits for any more must not hold that up.
            batch = [asked for asked in batch if not asked.answer.done()]
            if not batch:
                continue
            try:
                await self._answer(batch)
            except Exception as error:  # noqa: BLE001 - whoever asked gets it; the server goes on
                for asked in batch:
                    if not asked.answer.done():
                        asked.answer.set_exception(error)

    async def _answer(self, batch: Sequence[_Asked]) -> None:
        queries = [query for asked in batch for query in asked.queries]
        found = iter(await asyncio.to_thread(self._retriever.search, queries, max(asked.topk for asked in batch)))
        for asked in batch:
            answer = [next(found)[: asked.topk] for _ in asked.queries]
            if not asked.answer.done():
                asked.answer.set_result(answer)


def application(retriever: Retriever, default_topk: int = 3) -> web.Application:
    """The server as an aiohttp application: `POST /retrieve` and `GET /healthz`.

    Its runner needs `handler_cancellation=True`, so that questions end with the connection that they came by.
    """
    batcher = Batcher(retriever)

    async def retrieve(request: web.Request) -> web.Response:
        queries, topk, scored = _checked(await _json(request), default_topk)
        found = await batcher.search(queries, topk)
        return web.json_response({"result": [[_document(hit, scored) for hit in hits] for hits in found]})

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"passages": len(retriever.passages)})

    async def batching(app: web.Application) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_reasons_as_json])
    app.add_routes([web.post("/retrieve", retrieve), web.get("/healthz", healthz)])
    app.cleanup_ctx.append(batching)
    return app


@web.middleware
async def _reasons_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """`{"error": reason}` for every answer that is none, with its status and its other headers."""
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
    """The body, whatever the header says that it is: askers set `Content-Type` as they please."""
    try:
        return await request.json()
    except (ValueError, LookupError, RecursionError) as error:  # no JSON, no such encoding, or nested too deep
        raise web.HTTPBadRequest(text=f"the body is no JSON: {error}") from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {error}") from error


def _checked(asked: Any, default_topk: int) -> tuple[list[str], int, bool]:
    """The questions, how many passages each gets, and whether with scores; null means the same as nothing."""
    if not isinstance(asked, dict):
        raise web.HTTPBadRequest(text="give an object with query or queries")
    given = [asked[name] for name in ("query", "queries") if asked.get(name) is not None]
    if len(given) != 1:
        raise web.HTTPBadRequest(text="give either query or queries")
    queries = given if isinstance(given[0], str) else given[0]
    if not isinstance(queries, list) or not all(map(is_text, queries)):
        raise web.HTTPBadRequest(text="query is a text, queries a list of texts")
    if not 0 < len(queries) <= MAX_QUERIES:
        raise web.HTTPBadRequest(text=f"{len(queries)} queries; give 1 to {MAX_QUERIES}")
    topk = default_topk if asked.get("topk") is None else asked["topk"]
    if type(topk) is not int or not 0 < topk <= MAX_TOPK:
        raise web.HTTPBadRequest(text=f"topk {topk!r:.40} is none of 1 to {MAX_TOPK} passages")
    scored = False if asked.get("return_scores") is None else asked["return_scores"]
    if not isinstance(scored, bool):
        raise web.HTTPBadRequest(text=f"return_scores {scored!r:.40} is neither true nor false")
    return queries, topk, scored


def _document(hit: Found, scored: bool) -> dict[str, Any]:
    document = hit.passage._asdict()
    return {"document": document, "score": hit.score} if scored else document
