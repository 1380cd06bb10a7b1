"""What `make bench-peer` compares is the same on both sides."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.engine.run_player import RunPlayer
from baton.examples import lookup
from benchmarks import own_environment
from benchmarks.peer import slow_lookup
from benchmarks.peer.__main__ import MAX_DIFFERENCE, PARTS, trl
from benchmarks.peer.trl_side import Look, Rollouts, Way
from service.config import Config
from service.rollout.chat.chat import Chat, load_chat
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.engine import Generation, Sampling
from service.rollout.prompts.dataset import load_tasks, write_rows
from service.rollout.step_sinks import StepColumns
from service.types import Int32s, TrajectoryId

SAID = ("look fox age", "age look fox", "answer 7", "answer 8")
"""By turn; the second one does not end its turn."""


def said(chat: Chat, turn: int) -> tuple[Int32s, bool]:
    """The tokens of a turn, and whether the policy ended it."""
    token_ids, ends = chat.plain(SAID[turn]), turn != 1
    return (np.append(token_ids, chat.end_id).astype(np.int32) if ends else token_ids), ends


class Engine:
    """Baton's, which keeps what the newest turn was made of."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.turns = 0
        self.whole: list[int] = []

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        token_ids, ends = said(self._chat, self.turns)
        self.turns += 1
        self.whole = [*prompt_ids.tolist(), *token_ids.tolist()]
        ones = np.zeros(len(token_ids), np.int64)
        return Generation(token_ids, ones.astype(np.float32), ones, "stop" if ends else "length", ends)


class Llm:
    """vLLM's, which TRL's side calls once a turn."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.turns = 0

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        token_ids, ends = said(self._chat, self.turns)
        self.turns += 1
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in token_ids.tolist()]
        output = SimpleNamespace(
            token_ids=token_ids.tolist(), logprobs=logprobs, finish_reason="stop" if ends else "length"
        )
        return [SimpleNamespace(outputs=[output]) for _ in prompts]

    def generate_ids(
        self, prompts: list[list[int]], images: None, fields: dict[str, Any], n: int
    ) -> tuple[list[Any], None]:
        """What TRL's trainer does with the model's own `generate`."""
        token_ids, _ = said(self._chat, self.turns)
        self.turns += 1
        return [token_ids.tolist() for _ in prompts], None


@pytest.mark.parametrize("way", ["vllm", "own"])
def test_all_sides_make_the_same_tokens_of_the_same_responses(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    make_tokenizer(tmp_path, lookup.vocabulary())
    write_rows(tmp_path / "train.jsonl", lookup.rows(1, 0))
    config, (task,) = Config(), load_tasks(tmp_path / "train.jsonl")
    chat = load_chat(tmp_path, config.generator)

    engine = Engine(chat)
    end = asyncio.run(RunPlayer(config, tmp_path, engine).play(TrajectoryId(0, 0), task, StepColumns()))
    llm = Llm(chat)
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(llm=llm), _generate_single_turn=llm.generate_ids)
    rollouts = Rollouts(config, tmp_path, [task], way)([task.uid, task.uid], trainer)

    assert end.n_steps == engine.turns == llm.turns == 3
    assert rollouts["reward"] == [end.reward] * 2
    for prompt_ids, completion_ids, sampled in zip(
        rollouts["prompt_ids"], rollouts["completion_ids"], rollouts["env_mask"], strict=True
    ):
        assert [*prompt_ids, *completion_ids] == engine.whole
        assert sum(sampled) == sum(len(said(chat, turn)[0]) for turn in range(3))
    assert set(map(len, (rollouts["completion_ids"][0], rollouts["logprobs"][0], rollouts["env_mask"][0]))) == {
        len(completion_ids)
    }


def test_the_calls_of_the_slow_environment_take_between_50_and_500_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def play() -> None:
        (row,) = slow_lookup.rows(1, 0)
        environment = slow_lookup.SlowLookup()
        task = SimpleNamespace(prompt=(), extra_info=row["extra_info"])
        await environment.reset(task, 0)  # type: ignore[arg-type]
        for _ in range(2000):
            await environment.step("look fox age")

    monkeypatch.setattr(slow_lookup.asyncio, "sleep", sleep)
    asyncio.run(play())
    assert min(slept) == slow_lookup.MIN_SECONDS and max(slept) == slow_lookup.MAX_SECONDS
    assert np.median(slept) == pytest.approx(slow_lookup.MEDIAN_SECONDS, rel=0.1)


@pytest.mark.parametrize("difference", [10 * MAX_DIFFERENCE, math.nan])
def test_figures_of_trl_are_refused_where_its_engine_has_other_weights_than_its_trainer(
    difference: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = [Look(step, float(step), 2.0 * step, 0.5)._asdict() for step in range(1, 20)]
    monkeypatch.setattr(own_environment, "own_python", lambda *_: sys.executable)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)

    def found(difference: float) -> dict[str, float]:
        (tmp_path / "found.json").write_text(json.dumps({"looks": looks, "difference": difference}))
        return trl(PARTS["calm"], tmp_path / "config.json", tmp_path, tmp_path, tmp_path, "vllm")

    assert found(MAX_DIFFERENCE / 10) == {"seconds": 1.0, "cpu_seconds": 2.0, "reward": 0.5}
    with pytest.raises(SystemExit, match="differ"):
        found(difference)
