"""A client for retrieval servers: the servers of Search-R1 and SkyRL, and `search_server` beside this file.

POST /retrieve {"queries": ["marn"], "topk": 3, "return_scores": true}
{"result": [[{"document": {"id": "7", "contents": "marn is a town ..."}, "score": 0.9}]]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

PAUSES = (0.2, 0.4, 0.8)
"""Seconds before each further attempt to reach the server."""


class RetrievalFailed(Exception):
    """Raised if the retrieval server did not answer, or if its answer contains no passages."""


class RetrievalClient:
    """Queries a retrieval server; each episode has one client with one connection."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=seconds))

    async def retrieve(self, query: str, topk: int) -> list[str]:
        """The texts of the `topk` passages nearest to the query, nearest first.

        Raises:
            RetrievalFailed: the server refuses the query, or it cannot be reached.
        """
        question = {"queries": [query], "topk": topk, "return_scores": True}
        last = ""
        for pause in (*PAUSES, 0.0):
            try:
                return await self._ask(question)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(pause)
        raise RetrievalFailed(f"{self._url} did not answer {len(PAUSES) + 1} times, at last with {last}")

    async def _ask(self, question: Mapping[str, Any]) -> list[str]:
        async with self._session.post(self._url, json=question) as response:
            if response.status != 200:
                raise RetrievalFailed(f"{self._url} answered {response.status}: {(await response.text())[:200]}")
            try:
                answer = await response.json(content_type=None)
            except (ValueError, RecursionError) as error:
                raise RetrievalFailed(f"{self._url} answered with no JSON: {error}") from error
        try:
            return [str(hit.get("document", hit)["contents"]) for hit in answer["result"][0]]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RetrievalFailed(f"{self._url} answered without passages: {str(answer)[:200]}") from error

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()
