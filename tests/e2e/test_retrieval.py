"""The retrieval server as an actor, with a dense encoder, asked by its environment."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from transformers import BertConfig, BertModel

from actors.generator.retrieval import with_retrieval
from examples import data, search_r1
from service.config import Config
from service.config.rollout import EnvConfig, RetrievalConfig
from service.errors import RunFailed
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.environment import Task
from service.rollout.environments.factory import Environments
from tests.waiting import free_port, until

pytestmark = pytest.mark.slow


def made_encoder(folder: Path) -> Path:
    torch.manual_seed(0)
    make_tokenizer(folder, search_r1.vocabulary())
    BertModel(
        BertConfig(vocab_size=256, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    ).save_pretrained(folder)
    return folder


def listening(port: int) -> set[int]:
    """The living processes that accept connections there; one that is being ended has no id any more."""
    found = [one for one in psutil.net_connections("tcp") if one.laddr.port == port]
    return {one.pid for one in found if one.status == psutil.CONN_LISTEN and one.pid is not None}


def post(url: str, question: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(question).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["result"]


def test_a_dense_server_answers_an_environment_also_after_it_was_killed(local_ray: None, tmp_path: Path) -> None:
    retrieval = RetrievalConfig(
        encoder=made_encoder(tmp_path / "encoder"), embeddings=tmp_path / "vectors.npy", port=free_port()
    )
    config, actor = with_retrieval(Config(env=EnvConfig(name="search_r1", retrieval=retrieval)), has_gpu=False)
    assert actor is not None
    url = str(config.env.options["url"])
    passage = data.passages()[3]

    def answers() -> None:
        (found,) = post(url, {"query": passage, "topk": 2, "return_scores": True})
        assert found[0]["document"] == {"id": "3", "contents": passage}
        assert found[0]["score"] == pytest.approx(1, abs=1e-4) and found[0]["score"] >= found[1]["score"]
        many = post(url, {"queries": [passage, "salt"], "topk": 3, "return_scores": False})
        assert [len(documents) for documents in many] == [3, 3] and many[0][0]["contents"] == passage

    answers()
    task = Task("q", ({"role": "user", "content": "?"},), "", {"ground_truth": {"target": ["x"]}})

    async def searched() -> str:
        episode = Environments(config.env).make(task)
        await episode.reset(task, 0)
        result = await episode.step(f"<search> {passage} </search>")
        await episode.close()
        return result.messages[0]["content"]

    assert asyncio.run(searched()).startswith(f"<information> 1 : {passage}\n2 : ")
    killed = listening(retrieval.port)
    ray.kill(actor, no_restart=False)
    until(lambda: listening(retrieval.port) - killed, 240)
    answers()
    ray.kill(actor)


def test_a_server_that_cannot_read_its_corpus_ends_the_start_with_the_reason(local_ray: None, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": 1}\n')
    retrieval = RetrievalConfig(corpus=tmp_path / "corpus.jsonl")
    with pytest.raises(RunFailed, match=r"row 0: give an object with id and contents"):
        with_retrieval(Config(env=EnvConfig(name="search_r1", retrieval=retrieval)), has_gpu=False)


def test_without_a_configured_server_nothing_is_started(local_ray: None) -> None:
    assert with_retrieval(Config(), has_gpu=False) == (Config(), None)
