"""The examples of adapters; the tests of a library are skipped where it is not installed."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from threading import Event

import pytest

from baton.examples import data
from baton.examples.adapters.own_thread import OwnThread
from baton.examples.search_server import Corpus, application
from service.errors import UserError
from service.rollout.environment import Task
from service.rollout.environments.registry import make_environment
from tests.pure.rollout.conftest import served

with_skyrl = pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="skyrl-gym is not installed")
with_reasoning = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
PROMPT = ({"role": "user", "content": "6 times 7?"},)


@with_skyrl
async def test_a_search_episode_of_skyrl_gym_asks_the_example_of_a_server_over_several_turns() -> None:
    truth, town = {"ground_truth": {"target": ["olt"]}}, data.geography().towns[0]
    task = Task("p", PROMPT, "skyrl_gym", truth, {"data_source": "searchR1_nq"})  # type: ignore[arg-type]
    async with served(application(Corpus(data.CORPUS))) as url:
        options = {"env_id": "search", "search_url": f"{url}/retrieve", "topk": 1, "max_turns": 3}
        episode = make_environment("skyrl_gym", options)
        await episode.reset(task, 0)
        first = await episode.step(f"<search>{town.name}</search>")
        assert f"{town.name} is a town on the river" in first.messages[0]["content"]
        assert (first.reward, first.done) == (0, False)
        last = await episode.step("<answer>olt</answer>")
        assert (last.reward, last.done) == (1.0, True)
        await episode.close()
    with pytest.raises(UserError, match=r"env\.options: .*'skyrl_gym' refuses them: .*colour"):
        make_environment("skyrl_gym", {"env_id": "search", "colour": 1})


@with_reasoning
async def test_made_rows_of_reasoning_gym_are_scored_by_it_with_partial_credit() -> None:
    from baton.examples.adapters.reasoning_gym import made, rows

    options = {"dataset": "chain_sum"}
    for row, entry in zip(rows(5, 3), made("chain_sum", 3, 5, ()), strict=True):
        rewards = []
        for text in (f"so <answer> {entry['answer']} </answer>", entry["answer"], "<answer>?</answer>"):
            episode = make_environment("reasoning_gym", options)
            await episode.reset(Task(row["uid"], tuple(row["prompt"]), "", {}, row["extra_info"]), 0)
            rewards.append((await episode.step(text)).reward)
        assert rewards[:2] == [1.0, 1.0] and rewards[2] < 0.5


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


@pytest.mark.parametrize("name", ["skyrl_gym", "reasoning_gym"])
def test_without_the_library_its_name_is_in_the_refusal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"baton.examples.adapters.{name}", raising=False)
    with pytest.raises(UserError, match=rf"{name}.*cannot be loaded"):
        make_environment(name, {})
