"""Whatever an environment returns or raises, the trajectory ends with a reason and nothing of it gets further."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from service.handoff.steps.values import StopReason
from service.rollout.agent_loop import run_trajectory
from service.rollout.chat.chat import Chat
from service.rollout.env_guard import EnvGuard, LeakedTasks
from service.rollout.step_sinks import StepColumns
from service.types import TrajectoryId
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, limits
from tests.pure.rollout.hostile import HostileEnvironment

N = 1000
"""Trajectories in a second or two on one core."""


async def play_hostile(chat: Chat, seeds: range) -> Counter[str]:
    """The stop reasons of the trajectories; raises where something hostile came through."""
    engine, leaked, reasons = ScriptedEngine(chat, lambda words: "look fox age"), LeakedTasks(), Counter[str]()
    allowed = limits(chat, max_observation_characters=4000)
    for seed in seeds:
        guard = EnvGuard("hostile", lambda seed=seed: HostileEnvironment(seed), allowed, leaked)  # type: ignore[misc]
        columns = StepColumns()
        played = await run_trajectory(TrajectoryId(seed, 0), QUESTION, guard, engine, chat, allowed, 0, columns)
        reasons[StopReason(played.end.stop_reason)] += 1
        assert type(played.end.reward) is float
        assert all(type(name) is str and type(value) is float for name, value in played.info.items())
        json.dumps([dict(played.info), played.failure], ensure_ascii=False).encode()
        assert played.failure.isprintable()
    assert len(leaked) == 0
    return reasons


async def test_hostile_values_and_exceptions_cost_their_own_trajectories_only(chat: Chat) -> None:
    async with asyncio.timeout(500):
        reasons = await play_hostile(chat, range(N))
    wanted = {"environment_error", "environment_output", "environment_reward", "stop", "max_turns"}
    assert wanted <= set(reasons), "the draws reach every way to end"
