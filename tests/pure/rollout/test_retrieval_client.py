"""The client of the retrieval server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from service.rollout.retrieval import client
from service.rollout.retrieval.client import RetrievalClient, RetrievalFailed
from tests.pure.rollout.test_retrieval import served

SECONDS = 60.0
"""In which an answer must come; a slow one would be asked for again."""


@pytest.mark.asyncio
async def test_the_client_reads_passages_with_scores_and_without() -> None:
    for answer in ({"document": {"id": "1", "contents": "a"}, "score": 1.0}, {"id": "1", "contents": "a"}):
        async with served(answering(answer)) as url:
            asking = RetrievalClient(f"{url}/retrieve", SECONDS)
            assert await asking.retrieve("?", 3) == ["a"]
            await asking.close()


def answering(hit: Any) -> web.Application:
    async def retrieve(request: web.Request) -> web.Response:
        return web.json_response({"result": [[hit]]})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve)])
    return app


@pytest.mark.asyncio
async def test_the_client_asks_again_while_the_server_is_away_and_then_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    asking = RetrievalClient("http://127.0.0.1:9/retrieve", SECONDS)
    with pytest.raises(RetrievalFailed, match="did not answer 4 times"):
        await asking.retrieve("?", 3)
    await asking.close()


@pytest.mark.asyncio
async def test_a_server_that_dies_amid_its_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.01)
    whole = b'{"result": [[{"id": "0", "contents": "salt"}]]}'
    answers = [whole[:9], whole]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(whole)}\r\n\r\n"
        writer.write(head.encode() + answers.pop(0))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        asking = RetrievalClient("http://127.0.0.1:{1}/retrieve".format(*server.sockets[0].getsockname()), SECONDS)
        assert await asking.retrieve("?", 1) == ["salt"]
        await asking.close()


@pytest.mark.asyncio
async def test_an_answer_without_passages_is_an_error_that_names_the_server() -> None:
    async with served(answering("nothing")) as url:
        asking = RetrievalClient(f"{url}/retrieve", SECONDS)
        with pytest.raises(RetrievalFailed, match=r"127\.0\.0\.1.*answered without passages"):
            await asking.retrieve("?", 3)
        await asking.close()
        missing = RetrievalClient(f"{url}/elsewhere", SECONDS)
        with pytest.raises(RetrievalFailed, match="answered 404"):
            await missing.retrieve("?", 3)
        await missing.close()


@pytest.mark.asyncio
async def test_an_answer_that_is_no_json_is_an_error_that_names_the_server() -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    app = web.Application()
    app.add_routes([web.post("/retrieve", page)])
    async with served(app) as url:
        asking = RetrievalClient(f"{url}/retrieve", SECONDS)
        with pytest.raises(RetrievalFailed, match=r"127\.0\.0\.1.*no JSON"):
            await asking.retrieve("?", 3)
        await asking.close()
