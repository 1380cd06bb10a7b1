"""Search-R1: the environment, the retrieval server and its client, indices and encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import data, search_r1
from examples.search_r1 import SearchR1, normal
from service.errors import UserError
from service.rollout.environment import Task
from service.rollout.environments.registry import synthetic_data
from service.rollout.retrieval.corpus import load_corpus
from service.rollout.retrieval.retriever import Retriever
from service.rollout.retrieval.server import application
from tests.pure.rollout.test_retrieval import retriever, served


def test_passages_that_share_rare_words_come_first() -> None:
    (found,) = retriever().search(["where is the salt of sarn"], topk=2)
    assert [hit.passage.id for hit in found] == ["2", "1"]
    assert found[0].score > found[1].score


def test_a_question_without_known_words_still_gets_an_answer() -> None:
    (found,) = retriever().search(["?"], topk=9)
    assert {(hit.passage.id, hit.score) for hit in found} == {("0", 0.0), ("1", 0.0), ("2", 0.0)}


def question(truth: Any) -> Task:
    return Task("p", ({"role": "user", "content": "?"},), "search_r1", {"ground_truth": truth})


@pytest.mark.asyncio
async def test_a_search_is_answered_with_the_same_passages_by_the_server_and_in_process() -> None:
    town = data.geography().towns[0]
    whole = Retriever.by_words(data.CORPUS)
    async with served(application(whole)) as url:
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


@pytest.mark.asyncio
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
    result = await environment.step(f"<answer>{answer}</answer>")
    assert (result.reward, result.done) == (wanted, True)


@pytest.mark.asyncio
async def test_neither_search_nor_answer_is_told_what_to_give() -> None:
    environment = SearchR1()
    await environment.reset(question("olt"), 0)
    result = await environment.step("hm")
    assert result.messages[0]["content"] == "<information> give <search> or <answer> </information>"


@pytest.mark.asyncio
async def test_demonstrations_that_are_right_earn_the_reward_with_what_the_corpus_tells() -> None:
    rows = synthetic_data("search_r1").rows(30, 0)
    shown = search_r1.demonstrations(30, 1.0, np.random.default_rng(0))
    truths = {row["prompt"][0]["content"]: row["reward_spec"]["ground_truth"] for row in rows}
    for messages in shown:
        answer = normal(messages[-1]["content"].removeprefix("<answer>").removesuffix("</answer>"))
        assert answer in messages[-2]["content"].split()
        environment = SearchR1()
        await environment.reset(question(truths.get(messages[0]["content"], answer)), 0)
        for said, told in zip(messages[1:-1:2], messages[2::2], strict=True):
            assert (await environment.step(said["content"])).messages[0]["content"] == told["content"]
        assert (await environment.step(messages[-1]["content"])).reward == 1.0


def test_the_made_vocabulary_covers_rows_demonstrations_and_the_corpus() -> None:
    words = set(search_r1.vocabulary())
    shown = search_r1.demonstrations(100, 0.5, np.random.default_rng(0))
    texts = [m["content"] for messages in shown for m in messages] + data.passages()
    assert {word for text in texts for word in text.split()} <= words


def test_the_corpus_that_comes_with_baton_is_the_one_its_module_makes(tmp_path: Path) -> None:
    data.write_corpus(tmp_path / "corpus.jsonl")
    assert (tmp_path / "corpus.jsonl").read_text() == data.CORPUS.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b'{"id": 1}\n', "row 0.*contents"),
        (b'{"id": 1, "contents": null}\n', "row 0.*contents is no text"),
        (b'{"id": 1, "contents": "a"}\n[]\n', "row 1"),
        (b'{"id": 1, "contents": "a"}\n' + b"[" * 100_000, "row 1"),
        (b"\xff\n", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused_by_row(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_corpus(path)
