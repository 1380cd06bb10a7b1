"""Search-R1: the environment, the client of a retrieval server, and the example of a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from baton.examples import data, retrieval_client, search_r1
from baton.examples.retrieval_client import RetrievalClient, RetrievalFailed
from baton.examples.search_r1 import SearchR1
from baton.examples.search_server import Corpus, application, main
from service.errors import UserError
from service.rollout.environment import Task
from tests.pure.rollout.conftest import served

TEXTS = ["marn lies on the olt", "the olt flows through sarn", "sarn is known for salt"]
SECONDS = 60.0
"""In which an answer must come; a slow one would be asked for again."""


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"id": {i}, "contents": "{text}"}}\n' for i, text in enumerate(TEXTS)))
    return Corpus(path)


async def post(url: str, question: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/retrieve", json=question) as response:
        return response.status, await response.json()


def test_passages_that_share_rare_words_come_first(corpus: Corpus) -> None:
    (found,) = corpus.search(["where is the salt of Sarn"], topk=2)
    assert [hit.passage.id for hit in found] == [2, 1] and found[0].score > found[1].score
    (found,) = corpus.search(["?"], topk=9)
    assert {(hit.passage.id, hit.score) for hit in found} == {(0, 0.0), (1, 0.0), (2, 0.0)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b'{"id": 1}\n', "row 0.*contents"),
        (b'{"id": 1, "contents": null}\n', "row 0.*contents"),
        (b'{"id": 1, "contents": "a"}\n[]\n', "row 1"),
        (b'{"id": 1, "contents": "a"}\n' + b"[" * 100_000, "row 1"),
        (b'{"id": 1, "contents": "\xff"}\n', "row 0"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused_by_row(
    tmp_path: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        Corpus(path)
    assert main(["--corpus", str(path)]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_search_without_server_and_bm25s_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"install baton-rl\[search\]"):
        Corpus(data.CORPUS)


async def test_the_server_understands_one_query_and_many_with_scores_and_without(corpus: Corpus) -> None:
    async with served(application(corpus)) as url:
        status, one = await post(url, {"query": "salt", "topk": 1, "return_scores": True})
        ((hit,),) = one["result"]
        assert status == 200 and hit["document"] == {"id": "2", "contents": TEXTS[2]} and hit["score"] > 0
        _, many = await post(url, {"queries": ["salt", "marn"], "topk": 2, "return_scores": False})
        assert [(len(documents), documents[0]["id"]) for documents in many["result"]] == [(2, "2"), (2, "0")]
        _, answer = await post(url, {"query": "olt", "queries": None, "topk": None, "return_scores": None})
        assert [len(documents) for documents in answer["result"]] == [3]
        asked = [{"query": TEXTS[i % 3], "topk": 1 + i % 2} for i in range(50)]
        answers = await asyncio.gather(*(post(url, question) for question in asked))
    found = [(len(answer["result"][0]), answer["result"][0][0]["contents"]) for _, answer in answers]
    assert found == [(question["topk"], question["query"]) for question in asked]


async def test_a_malformed_question_is_refused_with_its_reason(corpus: Corpus) -> None:
    refused: Sequence[Any] = [
        *([], "salt", {}, {"query": None}, {"query": "a", "queries": ["b"]}, {"query": 3}, {"queries": ["a", None]}),
        *({"queries": []}, {"queries": ["a"] * 257}, {"query": "half \ud800 pair"}, {"query": "a", "topk": 0}),
        *({"query": "a", "topk": 101}, {"query": "a", "topk": True}, {"query": "a", "return_scores": "no"}),
    ]
    async with served(application(corpus)) as url:
        for question in refused:
            status, answer = await post(url, question)
            assert (status, list(answer)) == (400, ["error"]), question
        assert (await post(url, {"query": "salt"}))[0] == 200


def answering(*hits: Any) -> web.Application:
    async def retrieve(request: web.Request) -> web.Response:
        return web.json_response({"result": [list(hits)]})

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve), web.post("/page", page)])
    return app


async def asked(url: str) -> list[str]:
    client = RetrievalClient(url, SECONDS)
    try:
        return await client.retrieve("?", 3)
    finally:
        await client.close()


async def test_the_client_reads_passages_with_scores_and_without() -> None:
    for hit in ({"document": {"id": "1", "contents": "a"}, "score": 1.0}, {"id": "1", "contents": "a"}):
        async with served(answering(hit)) as url:
            assert await asked(f"{url}/retrieve") == ["a"]


async def test_an_answer_without_passages_is_an_error_that_names_the_server() -> None:
    async with served(answering("nothing")) as url:
        wrong = {"retrieve": "answered without passages", "elsewhere": "answered 404", "page": "no JSON"}
        for path, why in wrong.items():
            with pytest.raises(RetrievalFailed, match=rf"127\.0\.0\.1.*{why}"):
                await asked(f"{url}/{path}")


async def test_the_client_asks_again_while_the_server_is_away_and_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_client, "PAUSES", (0.01, 0.01, 0.01))
    with pytest.raises(RetrievalFailed, match="did not answer 4 times"):
        await asked("http://127.0.0.1:9/retrieve")


def question(truth: Any) -> Task:
    return Task("p", ({"role": "user", "content": "?"},), "search_r1", {"ground_truth": truth})


async def test_a_search_is_answered_with_the_same_passages_by_the_server_and_in_process() -> None:
    town = data.geography().towns[0]
    async with served(application(Corpus(data.CORPUS))) as url:
        told = []
        for environment in (SearchR1(), SearchR1(url=f"{url}/retrieve")):
            await environment.reset(question(town.river), 0)
            result = await environment.step(f"I must look. <search> {town.name} </search>")
            told.append(result.messages[0]["content"])
            assert (result.reward, result.done, result.info) == (0.0, False, {"searches": 1.0})
            await environment.close()
    assert told[0] == told[1]
    first = f"<information> 1 : {town.name} is a town on the river {town.river} .\n2 : "
    assert told[0].startswith(first)


@pytest.mark.parametrize(
    ("truth", "answer", "wanted"),
    [
        ("the River Olt", "river olt.", 1.0),
        (["olt", "alt"], "Alt", 1.0),
        ({"target": ["olt"]}, " olt ", 1.0),
        ({"target": "olt"}, "olt", 1.0),
        ("olt", "the river olt", 0.0),
        ("olt", "", 0.0),
    ],
)
async def test_an_answer_counts_without_case_articles_and_punctuation(truth: Any, answer: str, wanted: float) -> None:
    environment = SearchR1()
    await environment.reset(question(truth), 0)
    result = await environment.step("hm")
    assert result.messages[0]["content"] == "<information> give <search> or <answer> </information>"
    result = await environment.step(f"<answer>{answer}</answer>")
    assert (result.reward, result.done) == (wanted, True)


def test_the_made_vocabulary_covers_rows_demonstrations_and_the_corpus() -> None:
    words = set(search_r1.vocabulary())
    shown = search_r1.demonstrations(100, 0.5, np.random.default_rng(0))
    texts = [m["content"] for messages in shown for m in messages] + data.passages()
    assert {word for text in texts for word in text.split()} <= words


def test_the_corpus_that_comes_with_baton_is_the_one_its_module_makes(tmp_path: Path) -> None:
    data.write_corpus(tmp_path / "corpus.jsonl")
    assert (tmp_path / "corpus.jsonl").read_text() == data.CORPUS.read_text()
