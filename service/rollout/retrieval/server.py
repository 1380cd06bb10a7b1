"""The retrieval server: questions that arrive together are encoded together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import web

from service.rollout.environment import is_text
from service.rollout.retrieval.index import Found, Retriever

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
    """The server as an aiohttp application: `POST /retrieve` and `GET /healthz`."""
    batcher = Batcher(retriever)

    async def retrieve(request: web.Request) -> web.Response:
        try:
            asked = await request.json()
        except (ValueError, LookupError, RecursionError) as error:  # no JSON, no such encoding, or nested too deep
            raise web.HTTPBadRequest(text=f"the body is no JSON: {error}") from error
        queries, topk = _checked(asked, default_topk)
        found = await batcher.search(queries, topk)
        scored = bool(asked.get("return_scores", True))
        return web.json_response({"result": [[_document(hit, scored) for hit in hits] for hits in found]})

    async def healthz(request: web.Request) -> web.Response:
        return web.json_response({"passages": len(retriever.passages)})

    async def batching(app: web.Application) -> AsyncIterator[None]:
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    app = web.Application(client_max_size=1 << 20)
    app.add_routes([web.post("/retrieve", retrieve), web.get("/healthz", healthz)])
    app.cleanup_ctx.append(batching)
    return app


def _checked(asked: Any, default_topk: int) -> tuple[list[str], int]:
    """The questions, given as `query` or `queries`, and how many passages each gets."""
    if not isinstance(asked, dict):
        raise web.HTTPBadRequest(text="give an object with query or queries")
    queries = asked.get("queries", asked.get("query"))
    queries = [queries] if isinstance(queries, str) else queries
    if not isinstance(queries, list) or not all(map(is_text, queries)):
        raise web.HTTPBadRequest(text="query is a text, queries a list of texts")
    topk = asked.get("topk") or default_topk
    if not isinstance(topk, int) or not 0 < topk <= MAX_TOPK or not 0 < len(queries) <= MAX_QUERIES:
        raise web.HTTPBadRequest(text=f"at most {MAX_TOPK} passages for each of at most {MAX_QUERIES} queries")
    return queries, topk


def _document(hit: Found, scored: bool) -> dict[str, Any]:
    document = hit.passage._asdict()
    return {"document": document, "score": hit.score} if scored else document
