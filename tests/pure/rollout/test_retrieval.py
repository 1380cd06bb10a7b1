"""The retrieval server: what it answers, and what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import io
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from service.rollout.retrieval import server
from service.rollout.retrieval.__main__ import main
from service.rollout.retrieval.corpus import Passage
from service.rollout.retrieval.retriever import Hit, Index, Retriever
from service.rollout.retrieval.server import MAX_BODY_BYTES, Batcher, application
from service.rollout.retrieval.words import WordIndex
from service.types import Float32s, Int64s

TEXTS = ["marn lies on the olt", "the olt flows through sarn", "sarn is known for salt"]


def retriever(texts: Sequence[str] = TEXTS) -> Retriever:
    return Retriever([Passage(str(i), text) for i, text in enumerate(texts)], WordIndex(texts))


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://127.0.0.1:{1}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def post(url: str, question: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=question) as response:
        return response.status, await response.json()


async def reason(url: str, method: str = "POST", **how: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.request(method, url, **how) as response:
        answer = await response.json()
        assert list(answer) == ["error"]
        return response.status, answer["error"]


async def until_true(look: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not look():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_the_server_understands_one_query_and_many_with_scores_and_without() -> None:
    async with served(application(retriever())) as url:
        status, one = await post(f"{url}/retrieve", {"query": "salt", "topk": 1, "return_scores": True})
        assert status == 200
        ((hit,),) = one["result"]
        assert hit["document"] == {"id": "2", "contents": TEXTS[2]}
        assert 0 < hit["score"] <= 1
        _, many = await post(f"{url}/retrieve", {"queries": ["salt", "marn"], "topk": 2, "return_scores": False})
        assert [(len(documents), documents[0]["id"]) for documents in many["result"]] == [(2, "2"), (2, "0")]


@pytest.mark.asyncio
async def test_null_is_as_good_as_nothing_and_scores_come_only_where_they_are_asked_for() -> None:
    async with served(application(retriever(), default_topk=2)) as url:
        plain = {"query": "salt", "queries": None, "topk": None, "return_scores": None}
        for question in (plain, {"query": "salt"}, {"queries": ["salt"]}):
            status, answer = await post(f"{url}/retrieve", question)
            (hits,) = answer["result"]
            # The second shares no word with the question, as another one: which of the two comes is the index's choice.
            assert (status, len(hits), hits[0]["id"]) == (200, 2, "2")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("question", "told"),
    [
        ([], "give an object"),
        ("salt", "give an object"),
        ({}, "either query or queries"),
        ({"query": None}, "either query or queries"),
        ({"query": "a", "queries": ["b"]}, "either query or queries"),
        ({"query": 3}, "query is a text"),
        ({"query": {"text": "a"}}, "query is a text"),
        ({"queries": [3]}, "query is a text"),
        ({"queries": [["a"]]}, "query is a text"),
        ({"queries": ["a", None]}, "query is a text"),
        ({"queries": ["a", "half \ud800 pair"]}, "query is a text"),
        ({"queries": []}, "0 queries; give 1 to 256"),
        ({"queries": ["a"] * 257}, "257 queries; give 1 to 256"),
        ({"queries": ["a"] * 5000}, "5000 queries; give 1 to 256"),
        ({"query": "a", "topk": 0}, "topk 0 is none of 1 to 100"),
        ({"query": "a", "topk": -1}, "topk -1 is none"),
        ({"query": "a", "topk": 101}, "topk 101 is none"),
        ({"query": "a", "topk": 10**30}, "topk 1000"),
        ({"query": "a", "topk": 0.5}, "topk 0.5 is none"),
        ({"query": "a", "topk": 2.0}, "topk 2.0 is none"),
        ({"query": "a", "topk": True}, "topk True is none"),
        ({"query": "a", "topk": False}, "topk False is none"),
        ({"query": "a", "topk": "3"}, "topk '3' is none"),
        ({"query": "a", "topk": []}, "topk [] is none"),
        ({"query": "a", "return_scores": "no"}, "return_scores 'no' is neither"),
        ({"query": "a", "return_scores": 1}, "return_scores 1 is neither"),
    ],
)
async def test_a_question_that_is_none_is_refused_with_its_reason_and_the_server_goes_on(
    question: Any, told: str
) -> None:
    async with served(application(retriever())) as url:
        status, why = await reason(f"{url}/retrieve", json=question)
        assert status == 400 and told in why and len(why) < 120
        assert (await post(f"{url}/retrieve", {"query": "salt"}))[0] == 200


@pytest.mark.asyncio
async def test_the_most_passages_and_questions_that_may_be_asked_for_are_answered() -> None:
    async with served(application(retriever())) as url:
        _, answer = await post(f"{url}/retrieve", {"queries": ["salt"] * 256, "topk": 100})
        assert [len(hits) for hits in answer["result"]] == [3] * 256


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_is_the_callers_fault(body: bytes) -> None:
    async with served(application(retriever())) as url:
        status, why = await reason(f"{url}/retrieve", data=body)
        assert status == 400 and "no JSON" in why


@pytest.mark.asyncio
@pytest.mark.parametrize("more", [-1, 0, 1, 10 * MAX_BODY_BYTES])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_body_may_have_a_mebibyte_also_when_it_comes_compressed(more: int, packed: bool) -> None:
    body = b'{"query": "salt"}'.ljust(MAX_BODY_BYTES + more)
    sent = io.BytesIO(gzip.compress(body) if packed else body)
    headers = {"Content-Encoding": "gzip"} if packed else {}
    async with (
        served(application(retriever())) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/retrieve", data=sent, headers=headers) as response,
    ):
        answer = await response.json()
    if more <= 0:
        assert (response.status, list(answer)) == (200, ["result"])
    else:
        assert (response.status, list(answer)) == (413, ["error"]) and "1048576 bytes" in answer["error"]


@pytest.mark.asyncio
async def test_requests_that_are_malformed_get_their_reason_as_json() -> None:
    question = b'{"query": "salt"}'
    async with served(application(retriever())) as url:
        assert (await reason(url, "POST"))[0] == 404
        for method in ("GET", "PUT", "DELETE"):
            assert (await reason(f"{url}/retrieve", method))[0] == 405
        for kind, status in (("text/plain", 200), ("application/x-www-form-urlencoded", 200), ("a/b; charset=x", 400)):
            headers = {"Content-Type": kind}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/retrieve", data=question, headers=headers) as response,
            ):
                assert (response.status, list(await response.json())) == (
                    status,
                    ["result" if status == 200 else "error"],
                )
        packed = {"Content-Encoding": "gzip"}
        status, why = await reason(f"{url}/retrieve", data=question, headers=packed)
        assert status == 400 and "cannot be read" in why


class Broken:
    """An index without vectors."""

    def search(self, queries: Sequence[str], topk: int) -> tuple[Float32s, Int64s]:
        raise IndexError("no vectors")


@pytest.mark.asyncio
async def test_a_search_that_fails_is_an_answer_with_its_reason() -> None:
    async with served(application(replace(retriever(), index=Broken()))) as url:
        for _ in range(2):
            status, why = await reason(f"{url}/retrieve", json={"query": "salt"})
            assert (status, why) == (500, "the search failed: IndexError: no vectors")


@pytest.mark.asyncio
async def test_many_who_ask_at_once_get_their_own_answers() -> None:
    async with served(application(retriever())) as url:
        asked = [{"query": TEXTS[i % 3], "topk": 1 + i % 2} for i in range(200)]
        answers = await asyncio.gather(*(post(f"{url}/retrieve", question) for question in asked))
    found = [(len(answer["result"][0]), answer["result"][0][0]["contents"]) for _, answer in answers]
    assert found == [(question["topk"], question["query"]) for question in asked]


class Counting:
    """An index that keeps how many questions it was asked at once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.sizes: list[int] = []

    def search(self, queries: Sequence[str], topk: int) -> tuple[Float32s, Int64s]:
        self.sizes.append(len(queries))
        return self.index.search(queries, topk)


class Slow(Counting):
    """An index that answers only when it may."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self.may = Event()

    def search(self, queries: Sequence[str], topk: int) -> tuple[Float32s, Int64s]:
        assert self.may.wait(60)
        return super().search(queries, topk)


@pytest.mark.asyncio
async def test_a_question_whose_asker_hung_up_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[str] = []

    class Watched(Batcher):
        async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
            waiting.append(queries[0])
            try:
                return await super().search(queries, topk)
            finally:
                waiting.remove(queries[0])

    monkeypatch.setattr(server, "Batcher", Watched)
    made = retriever()
    slow = Slow(made.index)
    async with served(application(replace(made, index=slow))) as url:
        try:
            first = asyncio.ensure_future(post(f"{url}/retrieve", {"query": "salt"}))
            await until_true(lambda: waiting == ["salt"])
            gone = asyncio.ensure_future(post(f"{url}/retrieve", {"queries": ["olt"] * 50}))
            await until_true(lambda: "olt" in waiting)
            last = asyncio.ensure_future(post(f"{url}/retrieve", {"query": "sarn"}))
            await until_true(lambda: "sarn" in waiting)
            gone.cancel()
            await until_true(lambda: "olt" not in waiting)
        finally:
            slow.may.set()
        assert ((await first)[0], (await last)[0]) == (200, 200)
    assert slow.sizes == [1, 1]


@pytest.mark.asyncio
async def test_questions_that_come_while_the_encoder_is_busy_are_answered_together() -> None:
    made = retriever()
    counting = Counting(made.index)
    batcher = Batcher(replace(made, index=counting))
    asked = [asyncio.ensure_future(batcher.search([text], 1 + i % 2)) for i, text in enumerate(TEXTS * 10)]
    answers = await asyncio.gather(*asked)
    assert [found[0].passage.contents for (found,) in answers] == TEXTS * 10
    assert [len(found) for (found,) in answers] == [1, 2] * 15
    assert counting.sizes == [30]


@pytest.mark.asyncio
async def test_a_search_that_fails_is_told_to_those_who_asked_and_the_next_one_succeeds() -> None:
    made = retriever()
    batcher = Batcher(made)
    with pytest.raises(AttributeError):
        await batcher.search([None], 1)  # type: ignore[list-item]
    assert await batcher.search(["salt"], 1) == made.search(["salt"], 1)


def test_an_address_that_cannot_be_served_is_one_line_before_the_corpus_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], 99999]
        for where in (*([f"--port={port}"] for port in ports), ["--host=no.such.host.invalid"]):
            assert main([*where, "--corpus=absent.jsonl"]) == 2
            assert re.fullmatch(r"--host \S+ --port \d+: cannot listen there: .+\n", capsys.readouterr().err)


def test_a_device_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--port=0", f"--encoder={tmp_path}", "--device=tpx"]) == 2
    assert re.fullmatch(r"the encoder cannot run on 'tpx': .+; give cpu\n", capsys.readouterr().err)


def test_a_server_that_stands_alone_says_where_it_is_and_ends_when_it_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service.rollout.retrieval", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as alone:
        try:
            assert alone.stdout is not None and alone.stderr is not None
            said = alone.stdout.readline()
            url = said.split()[-1]
            assert asyncio.run(post(url, {"query": "salt"}))[0] == 200
            alone.terminate()
            assert (alone.wait(60), alone.stderr.read()) == (0, "")
        finally:
            alone.kill()
