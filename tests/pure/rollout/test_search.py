"""Search-R1: the environment, the retrieval server and its client, indices and encoders."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import BertConfig, BertModel

from service.errors import UserError
from service.rollout import data
from service.rollout.environment import Task
from service.rollout.environments import made, made_search
from service.rollout.environments.search_r1 import SearchR1, normal
from service.rollout.retrieval import client
from service.rollout.retrieval.client import RetrievalClient, RetrievalFailed
from service.rollout.retrieval.dense import DenseEncoder
from service.rollout.retrieval.index import Index, NumpyIndex, Passage, Retriever, WordEncoder, flat_index, load_corpus
from service.rollout.retrieval.server import Batcher, application
from service.rollout.tokenizer import make_tokenizer
from service.types import Float32s, Int64s

TEXTS = ["marn lies on the olt", "the olt flows through sarn", "sarn is known for salt"]


def retriever(texts: Sequence[str] = TEXTS) -> Retriever:
    return Retriever.of([Passage(str(i), text) for i, text in enumerate(texts)], WordEncoder(texts))


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://127.0.0.1:{1}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def post(url: str, question: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url, json=question) as response:
        body = await response.text()
        return response.status, json.loads(body) if response.status == 200 else body


def test_passages_that_share_rare_words_come_first() -> None:
    (found,) = retriever().search(["where is the salt of sarn"], topk=2)
    assert [hit.passage.id for hit in found] == ["2", "1"]
    assert found[0].score > found[1].score


def test_a_question_without_known_words_still_gets_an_answer() -> None:
    (found,) = retriever().search(["?"], topk=9)
    assert {(hit.passage.id, hit.score) for hit in found} == {("0", 0.0), ("1", 0.0), ("2", 0.0)}


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
@pytest.mark.parametrize(
    "question",
    [
        [],
        {},
        {"query": 3},
        {"queries": [3]},
        {"queries": []},
        {"query": "a", "topk": 0.5},
        {"query": "a", "topk": 101},
        {"query": "a", "topk": -1},
        {"query": "a", "topk": 10**9},
        {"queries": ["a"] * 257},
        {"queries": ["a", "half \ud800 pair"]},
    ],
)
async def test_a_question_that_is_none_is_refused_and_the_server_goes_on(question: Any) -> None:
    async with served(application(retriever())) as url:
        assert (await post(f"{url}/retrieve", question))[0] == 400
        assert (await post(f"{url}/retrieve", {"query": "salt"}))[0] == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_is_the_callers_fault(body: bytes) -> None:
    async with (
        served(application(retriever())) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/retrieve", data=body) as response,
    ):
        assert (response.status, "no JSON" in await response.text()) == (400, True)


class Counting:
    """An index that keeps how many questions it was asked at once."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.sizes: list[int] = []

    def search(self, queries: Float32s, topk: int) -> tuple[Float32s, Int64s]:
        self.sizes.append(len(queries))
        return self.index.search(queries, topk)


@pytest.mark.asyncio
async def test_questions_that_come_while_the_encoder_is_busy_are_answered_together() -> None:
    made = retriever()
    counting = Counting(made.index)
    batcher = Batcher(replace(made, index=counting))
    asked = [asyncio.ensure_future(batcher.search([text], 1 + i % 2)) for i, text in enumerate(TEXTS * 10)]
    await asyncio.sleep(0)
    running = asyncio.ensure_future(batcher.run())
    answers = await asyncio.gather(*asked)
    running.cancel()
    assert [found[0].passage.contents for (found,) in answers] == TEXTS * 10
    assert [len(found) for (found,) in answers] == [1, 2] * 15
    assert counting.sizes == [30]


@pytest.mark.asyncio
async def test_a_search_that_fails_is_told_to_those_who_asked_and_the_next_one_succeeds() -> None:
    made = retriever()
    batcher = Batcher(made)
    running = asyncio.ensure_future(batcher.run())
    with pytest.raises(AttributeError):
        await batcher.search([None], 1)  # type: ignore[list-item]
    assert await batcher.search(["salt"], 1) == made.search(["salt"], 1)
    running.cancel()


@pytest.mark.asyncio
async def test_the_client_reads_passages_with_scores_and_without() -> None:
    for answer in ({"document": {"id": "1", "contents": "a"}, "score": 1.0}, {"id": "1", "contents": "a"}):
        async with served(answering(answer)) as url:
            asking = RetrievalClient(f"{url}/retrieve", 5.0)
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
    asking = RetrievalClient("http://127.0.0.1:9/retrieve", 5.0)
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
        asking = RetrievalClient("http://127.0.0.1:{1}/retrieve".format(*server.sockets[0].getsockname()), 5.0)
        assert await asking.retrieve("?", 1) == ["salt"]
        await asking.close()


@pytest.mark.asyncio
async def test_an_answer_without_passages_is_an_error_that_names_the_server() -> None:
    async with served(answering("nothing")) as url:
        asking = RetrievalClient(f"{url}/retrieve", 5.0)
        with pytest.raises(RetrievalFailed, match=r"127\.0\.0\.1.*answered without passages"):
            await asking.retrieve("?", 3)
        await asking.close()
        missing = RetrievalClient(f"{url}/elsewhere", 5.0)
        with pytest.raises(RetrievalFailed, match="answered 404"):
            await missing.retrieve("?", 3)
        await missing.close()


def question(truth: Any) -> Task:
    return Task("p", ({"role": "user", "content": "?"},), "search_r1", {"ground_truth": truth})


@pytest.mark.asyncio
async def test_a_search_is_answered_with_the_same_passages_by_the_server_and_in_process() -> None:
    town = data.world().towns[0]
    passages = load_corpus(data.CORPUS)
    whole = Retriever.of(passages, WordEncoder([passage.contents for passage in passages]))
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
    rows = made("search_r1").rows(30, 0)
    shown = made_search.demonstrations(30, 1.0, np.random.default_rng(0))
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
    words = set(made_search.vocabulary())
    shown = made_search.demonstrations(100, 0.5, np.random.default_rng(0))
    texts = [m["content"] for messages in shown for m in messages] + data.passages()
    assert {word for text in texts for word in text.split()} <= words


def test_the_corpus_that_comes_with_baton_is_the_one_its_module_makes(tmp_path: Path) -> None:
    data.write_corpus(tmp_path / "corpus.jsonl")
    assert (tmp_path / "corpus.jsonl").read_text() == data.CORPUS.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has no rows"), ('{"id": 1}\n', "row 0.*contents"), ('{"id": 1, "contents": "a"}\n[]\n', "row 1")],
)
def test_a_file_that_is_no_corpus_is_refused_by_row(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_corpus(path)


def test_vectors_are_written_once_and_read_afterwards(tmp_path: Path) -> None:
    passages = [Passage(str(i), text) for i, text in enumerate(TEXTS)]
    encoder, embeddings = WordEncoder(TEXTS), tmp_path / "vectors.npy"
    first = Retriever.of(passages, encoder, embeddings).search(TEXTS, 3)
    written = embeddings.stat().st_mtime_ns
    assert Retriever.of(passages, encoder, embeddings).search(TEXTS, 3) == first
    assert embeddings.stat().st_mtime_ns == written
    assert os.listdir(tmp_path) == ["vectors.npy"]


def test_vectors_are_kept_under_the_configured_name(tmp_path: Path) -> None:
    Retriever.of([Passage("0", "salt")], WordEncoder(["salt"]), tmp_path / "vectors")
    assert os.listdir(tmp_path) == ["vectors"]


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda path: np.save(path, np.zeros((2, 3), np.float32)), r"float32 \[2, 3\], .* float32 \[3, \d+\]"),
        (lambda path: np.save(path, np.zeros((3, 2), np.float32)), r"float32 \[3, 2\], .* float32 \[3, \d+\]"),
        (lambda path: np.save(path, np.array([{}])), "no vectors"),
        (lambda path: path.write_bytes(b"\x93NUMPY\x01\0\x76\0{'descr"), "no vectors"),
    ],
)
def test_kept_vectors_that_do_not_fit_corpus_and_encoder_are_refused(
    tmp_path: Path, write: Callable[[Path], Any], told: str
) -> None:
    write(tmp_path / "vectors.npy")
    passages = [Passage(str(i), text) for i, text in enumerate(TEXTS)]
    with pytest.raises(UserError, match=f"vectors.npy .*{told}.*remove it"):
        Retriever.of(passages, WordEncoder(TEXTS), tmp_path / "vectors.npy")


@pytest.mark.parametrize("library", ["faiss", "numpy"])
def test_a_flat_index_finds_what_comparing_with_everything_finds(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "faiss":
        pytest.importorskip("faiss")
    else:
        monkeypatch.setitem(sys.modules, "faiss", None)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((500, 16)).astype(np.float32)
    queries = rng.standard_normal((7, 16)).astype(np.float32)
    index = flat_index(vectors)
    assert isinstance(index, NumpyIndex) == (library == "numpy")
    scores, numbers = index.search(queries, 5)
    for query, row, nearest in zip(queries, scores, numbers, strict=True):
        everything = vectors @ query
        assert nearest.tolist() == np.argsort(-everything)[:5].tolist()
        np.testing.assert_allclose(row, everything[nearest], rtol=1e-5)


def test_a_dense_encoder_averages_over_real_tokens_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_tokenizer(tmp_path, sorted({word for text in TEXTS for word in text.split()}))
    tiny = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(tiny).save_pretrained(tmp_path)
    encoder = DenseEncoder(tmp_path, torch.device("cpu"), batch_size=2)
    vectors = encoder.passages([*TEXTS, "olt"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    # Padding beside a longer text must not change a shorter one, nor must the order.
    np.testing.assert_allclose(encoder.queries(["olt"])[0], vectors[3], atol=1e-5)
    np.testing.assert_allclose(encoder.passages([TEXTS[2]])[0], vectors[2], atol=1e-5)
    # A question may have no token at all, alone or beside others.
    assert not encoder.queries([""]).any()
    assert not encoder.queries(["olt", ""])[1].any()


def test_a_folder_without_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        DenseEncoder(tmp_path, torch.device("cpu"))
