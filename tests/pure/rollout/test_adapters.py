"""Environments of other libraries; tests that need one are skipped where it is not installed."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import pytest

from baton.examples import data
from baton.examples.search_server import Corpus, application
from service.config.rollout import DataConfig, EnvConfig
from service.errors import UserError
from service.rollout.environment import Task
from service.rollout.environments.registry import make_environment, synthetic_data
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.mixture import eval_files, train_file
from tests.pure.rollout.conftest import served

with_skyrl = pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="skyrl-gym is not installed")
with_reasoning = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
PROMPT = ({"role": "user", "content": "6 times 7?"},)


@with_skyrl
@pytest.mark.parametrize(("text", "wanted"), [("#### 42", 1.0), ("#### 41", 0.0)])
async def test_an_episode_of_skyrl_gym_is_judged_by_it(text: str, wanted: float) -> None:
    episode = make_environment("skyrl_gym/gsm8k", {})
    task = Task("p", PROMPT, "skyrl_gym/gsm8k", {"method": "rule", "ground_truth": "42"})  # type: ignore[arg-type]
    assert list(await episode.reset(task, 0)) == list(PROMPT)
    result = await episode.step(text)
    assert (result.reward, result.done) == (wanted, True)
    await episode.close()


@with_skyrl
async def test_a_search_episode_of_skyrl_gym_asks_the_example_of_a_server_over_several_turns() -> None:
    truth, town = {"ground_truth": {"target": ["olt"]}}, data.geography().towns[0]
    task = Task("p", PROMPT, "skyrl_gym/search", truth, {"data_source": "searchR1_nq"})  # type: ignore[arg-type]
    async with served(application(Corpus(data.CORPUS))) as url:
        episode = make_environment("skyrl_gym/search", {"search_url": f"{url}/retrieve", "topk": 1, "max_turns": 3})
        await episode.reset(task, 0)
        first = await episode.step(f"<search>{town.name}</search>")
        assert f"{town.name} is a town on the river" in first.messages[0]["content"]
        assert (first.reward, first.done) == (0, False)
        last = await episode.step("<answer>olt</answer>")
        assert (last.reward, last.done) == (1.0, True)
        await episode.close()


@with_skyrl
def test_an_option_that_the_skyrl_gym_environment_does_not_take_is_an_error() -> None:
    adapter = import_module("service.rollout.environments.adapters")
    spec = import_module("skyrl_gym").spec("search").entry_point
    assert adapter.env_config(spec, {"topk": 7}).topk == 7
    with pytest.raises(UserError, match=r"env\.options: .*'skyrl_gym/search' refuses them: .*colour"):
        make_environment("skyrl_gym/search", {"colour": 1})


@with_skyrl
def test_an_environment_that_skyrl_gym_does_not_know_is_named_before_the_run() -> None:
    with pytest.raises(UserError, match=r"^env\.name: skyrl-gym has no environment 'serch': "):
        make_environment("skyrl_gym/serch", {})


@with_reasoning
async def test_made_rows_of_reasoning_gym_are_scored_by_it_with_partial_credit() -> None:
    rows = synthetic_data("reasoning_gym/chain_sum").rows(5, seed=3)
    assert rows == synthetic_data("reasoning_gym/chain_sum").rows(5, seed=3)
    dataset = import_module("reasoning_gym").create_dataset("chain_sum", seed=3, size=5)
    for row, entry in zip(rows, dataset, strict=True):
        task = Task(row["uid"], tuple(row["prompt"]), row["env_class"], {}, row["extra_info"])
        rewards = []
        for text in (f"so <answer> {entry['answer']} </answer>", entry["answer"], "<answer>?</answer>"):
            episode = make_environment(row["env_class"], {})
            await episode.reset(task, 0)
            result = await episode.step(text)
            assert result.done
            rewards.append(result.reward)
        assert rewards[:2] == [1.0, 1.0]
        assert rewards[2] < 0.5


class Sums:
    """Stands for reasoning-gym: its questions depend on the options."""

    @staticmethod
    def create_dataset(name: str, seed: int, size: int, terms: int = 2) -> list[dict[str, str]]:
        return [{"question": f"{name} {seed} {index} of {terms} terms"} for index in range(size)]


async def test_rows_are_made_with_the_options_of_the_environment_that_plays_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", Sums)  # type: ignore[arg-type]
    env = EnvConfig(name="reasoning_gym/sums", options={"terms": 5})
    data = DataConfig(make_rows=2, eval_make_rows=2)
    for path in (train_file(data, env, tmp_path, 0), eval_files(data, env, tmp_path, 0)["made"]):
        for task in load_tasks(path):
            assert "of 5 terms" in task.prompt[0]["content"]
            assert await make_environment(env.name, env.options).reset(task, 0) == task.prompt


class Hangs:
    """Stands for reasoning-gym: judging the answer `hang` takes until it is let go."""

    def __init__(self) -> None:
        self.go = Event()
        self.hanging: list[str] = []

    def create_dataset(self, name: str, seed: int, size: int) -> Hangs:
        return self

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": "?"}

    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        if answer != "hang":
            return 1.0
        self.hanging.append(answer)
        return float(self.go.wait(240))


async def test_calls_that_hang_take_no_thread_from_other_episodes_and_none_from_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Hangs()
    monkeypatch.setitem(sys.modules, "reasoning_gym", library)  # type: ignore[arg-type]
    task = Task("p", ({"role": "user", "content": "?"},), "", {}, {"seed": 0, "size": 1, "index": 0})

    async def played(answer: str) -> float:
        episode = make_environment("reasoning_gym/hangs", {})
        await episode.reset(task, 0)
        try:
            return (await episode.step(answer)).reward
        finally:
            await episode.close()

    n = (os.cpu_count() or 1) + 8  # more than the threads that all work of a process shares
    hanging = [asyncio.create_task(played("hang")) for _ in range(n)]
    try:
        async with asyncio.timeout(60):
            assert await played("4") == 1.0
            assert await asyncio.to_thread(lambda: 3) == 3
            while len(library.hanging) < n:
                await asyncio.sleep(0.01)
        hanging[0].cancel()
        done, _ = await asyncio.wait(hanging, timeout=0.1)
        assert not done  # a task whose thread hangs goes on, so that it is counted as leaked
    finally:
        library.go.set()
    ended = await asyncio.gather(*hanging, return_exceptions=True)
    assert isinstance(ended[0], asyncio.CancelledError) and ended[1:] == [1.0] * (n - 1)


@with_reasoning
async def test_a_row_of_another_dataset_is_an_error_of_its_episode() -> None:
    (row,) = synthetic_data("reasoning_gym/chain_sum").rows(1, seed=3)
    episode = make_environment("reasoning_gym/chain_sum", {})
    with pytest.raises(ValueError, match="another question"):
        await episode.reset(Task("p", PROMPT, "", {}, row["extra_info"]), 0)  # type: ignore[arg-type]


@with_reasoning
def test_a_dataset_that_reasoning_gym_does_not_know_is_named() -> None:
    with pytest.raises(UserError, match="does not make 'chain_sums'"):
        synthetic_data("reasoning_gym/chain_sums").rows(1, 0)
    with pytest.raises(UserError, match="does not make 'chain_sums'"):
        make_environment("reasoning_gym/chain_sums", {})
    with pytest.raises(UserError, match=r"does not make 'chain_sum' with \{'colour': 1\}"):
        make_environment("reasoning_gym/chain_sum", {"colour": 1})


@pytest.mark.parametrize(
    ("name", "extra"), [("skyrl_gym/gsm8k", "skyrl-gym"), ("reasoning_gym/chain_sum", "reasoning-gym")]
)
def test_without_the_library_the_extra_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, name.partition("/")[0], None)
    with pytest.raises(UserError, match=rf"install baton-rl\[{extra}\]"):
        make_environment(name, {})
