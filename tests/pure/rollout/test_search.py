"""Search-R1: the environment, the client of a retrieval server, the example of a server, and adapters of libraries."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from baton.examples import data, retrieval_client
from baton.examples.adapters.own_thread import OwnThread
from baton.examples.retrieval_client import RetrievalClient, RetrievalFailed
from baton.examples.search_r1 import SearchR1
from baton.examples.search_server import Corpus, application, main
from service.config import load_config
from service.config.rollout import COMPUTE_SCORE
from service.errors import UserError
from service.rollout.environment import StepResult, Task
from service.rollout.environments.registry import make_environment
from service.rollout.prompts.dataset import load_tasks
from tests.pure.rollout.conftest import served

TEXTS = ["marn lies on the olt", "the olt flows through sarn", "sarn is known for salt"]
SECONDS = 60.0
"""In which an answer must come; a slow one would be asked for again."""


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"id": {i}, "contents": "{text}"}}\n' for i, text in enumerate(TEXTS)))
    return Corpus(path)


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


async def post(url: str, question: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/retrieve", json=question) as response:
        return response.status, await response.json()


async def test_the_server_understands_one_query_and_many_and_refuses_malformed_ones_with_the_reason(
    corpus: Corpus,
) -> None:
    refused: Sequence[Any] = [
        *([], "salt", {}, {"query": None}, {"query": "a", "queries": ["b"]}, {"query": 3}, {"queries": ["a", None]}),
        *({"queries": []}, {"queries": ["a"] * 257}, {"query": "half \ud800 pair"}, {"query": "a", "topk": 0}),
        *({"query": "a", "topk": 101}, {"query": "a", "topk": True}, {"query": "a", "return_scores": "no"}),
    ]
    async with served(application(corpus)) as url:
        status, one = await post(url, {"query": "salt", "topk": 1, "return_scores": True})
        ((hit,),) = one["result"]
        assert status == 200 and hit["document"] == {"id": "2", "contents": TEXTS[2]} and hit["score"] > 0
        _, many = await post(url, {"queries": ["salt", "marn"], "topk": 2, "return_scores": False})
        assert [(len(documents), documents[0]["id"]) for documents in many["result"]] == [(2, "2"), (2, "0")]
        _, answer = await post(url, {"query": "olt", "queries": None, "topk": None, "return_scores": None})
        assert [len(documents) for documents in answer["result"]] == [3]
        for question in refused:
            status, answer = await post(url, question)
            assert (status, list(answer)) == (400, ["error"]), question
        asked = [{"query": TEXTS[i % 3], "topk": 1 + i % 2} for i in range(50)]
        answers = await asyncio.gather(*(post(url, question) for question in asked))
    found = [(len(answer["result"][0]), answer["result"][0][0]["contents"]) for _, answer in answers]
    assert found == [(question["topk"], question["query"]) for question in asked]


async def asked(url: str) -> list[str]:
    client = RetrievalClient(url, SECONDS)
    try:
        return await client.retrieve("?", 3)
    finally:
        await client.close()


async def test_the_client_reads_passages_and_names_a_server_that_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    passage = {"id": "1", "contents": "a"}
    answers = {"bare": passage, "scored": {"document": passage, "score": 1.0}, "none": "nothing"}

    async def answer(request: web.Request) -> web.Response:
        kind = request.match_info["kind"]
        if kind == "page":
            return web.Response(text="<html>", content_type="text/html")
        return web.json_response({"result": [[answers[kind]]]})

    (app := web.Application()).add_routes([web.post("/{kind}", answer)])
    async with served(app) as url:
        assert await asked(f"{url}/bare") == await asked(f"{url}/scored") == ["a"]
        wrong = {"none": "answered without passages", "else/where": "answered 404", "page": "no JSON"}
        for path, why in wrong.items():
            with pytest.raises(RetrievalFailed, match=rf"127\.0\.0\.1.*{why}"):
                await asked(f"{url}/{path}")
    monkeypatch.setattr(retrieval_client, "PAUSES", (0.01, 0.01, 0.01))
    with pytest.raises(RetrievalFailed, match="did not answer 4 times"):
        await asked("http://127.0.0.1:9/retrieve")


def question(truth: Any) -> Task:
    return Task("p", ({"role": "user", "content": "?"},), "search_r1", {"ground_truth": truth})


async def test_a_search_is_answered_with_the_same_passages_by_the_server_in_process_and_as_a_tool() -> None:
    town = data.geography().towns[0]
    call = {"name": "search", "arguments": {"query": town.name}}
    searches = {
        "tags": f"I must look. <search> {town.name} </search>",
        "tools": f"<tool_call>{json.dumps(call)}</tool_call>",
    }
    told: dict[str, list[str]] = {"tags": [], "tools": []}
    async with served(application(Corpus(data.CORPUS))) as url:
        for calls, text in searches.items():
            for environment in (SearchR1(calls=calls), SearchR1(calls=calls, url=f"{url}/retrieve")):  # type: ignore[arg-type]
                await environment.reset(question(town.river), 0)
                result = await environment.step(text)
                told[calls].append(result.messages[0]["content"])
                assert (result.reward, result.done) == (0.0, False)
                last = await environment.step(f"<answer>{town.river}</answer>")
                assert (last.reward, last.done) == (1.0, True)
                await environment.close()
    first = f"1 : {town.name} is a town on the river {town.river} .\n2 : "
    for calls, begin in (("tags", f"<information> {first}"), ("tools", first)):
        assert told[calls][0] == told[calls][1] and told[calls][0].startswith(begin)


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


def test_the_corpus_that_comes_with_baton_is_the_one_its_module_makes(tmp_path: Path) -> None:
    data.write_corpus(tmp_path / "corpus.jsonl")
    assert (tmp_path / "corpus.jsonl").read_text() == data.CORPUS.read_text()


# -- adapters ----------------------------------------------------------------------------------------------------------


async def test_calls_that_hang_take_no_thread_from_other_episodes() -> None:
    go, hanging = Event(), OwnThread()
    waits = asyncio.create_task(hanging.call(go.wait, 240))
    try:
        async with asyncio.timeout(60):
            assert await OwnThread().call(int, "3") == 3
        waits.cancel()
        done, _ = await asyncio.wait([waits], timeout=0.1)
        assert not done  # a task whose thread hangs goes on, so that it is counted as leaked
    finally:
        go.set()
    with pytest.raises(asyncio.CancelledError):
        await waits


@pytest.mark.parametrize("name", ["skyrl_gym", "reasoning_gym", "bm25s"])
def test_without_the_library_its_name_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"baton.examples.adapters.{name}", raising=False)
    with pytest.raises(
        UserError, match=rf"{name}.*cannot be loaded" if "gym" in name else r"install baton-rl\[search\]"
    ):
        make_environment(name, {}) if "gym" in name else Corpus(data.CORPUS)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """As a user of verl has it."""
    right = solution_str == ground_truth
    more = {"level": np.int64(extra_info["level"]), "near": np.bool_(right), "pred": solution_str, "of": data_source}
    return {"score": right - 0.5, "acc": right, **more}


async def compute_score_async(solution_str: str, **others: Any) -> float:
    """The same, asynchronous, and with fewer names."""
    assert others.keys() == {"data_source", "ground_truth", "extra_info"} and others["data_source"] == "my/sums"
    return float(solution_str == others["ground_truth"])


def reward_of_trl(completions: list[str], **others: Any) -> list[float]:
    """As a user of TRL has it."""
    return [1.0 for _ in completions]


async def test_a_reward_function_of_verl_scores_verls_rows_by_one_setting(tmp_path: Path) -> None:
    row = {
        "data_source": "my/sums",
        "prompt": [{"role": "user", "content": "7 + 7 ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "14"},
        "extra_info": {"level": 2},
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    (task,) = load_tasks(tmp_path / "train.jsonl")
    found = []
    for function in ("compute_score", "compute_score_async"):
        config = load_config([Path("configs/quickstart.yaml")], [f"env.compute_score={__name__}:{function}"]).env
        environment = make_environment(config.name, config.options)
        assert await environment.reset(task, 0) == task.prompt
        found.append(await environment.step("14"))
        await environment.close()
    assert found[0] == StepResult((), 0.5, True, {"score": 0.5, "acc": 1.0, "level": 2.0, "near": 1.0})
    assert found[1] == StepResult((), 1.0, True, {"score": 1.0})
    for function, reason in (
        (f"{__name__}:compute_scor", "did you mean"),
        (__name__, f"write {__name__}:NAME"),
        ("tests/pure/rollout/test_search.py:compute_score", f"write {__name__}:compute_score"),
        (f"{__name__}:reward_of_trl", "missing a required argument: 'completions'"),
    ):
        with pytest.raises(UserError, match=rf"env\.compute_score: .*{re.escape(reason)}"):
            make_environment(COMPUTE_SCORE, {"function": function})
