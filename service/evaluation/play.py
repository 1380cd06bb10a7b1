"""Plays the trajectories of an evaluation; each engine plays one shard of an evaluation set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from service.evaluation.scores import EvalShard, EvalTrajectory
from service.handoff.steps.tables import is_truncated_K
from service.rollout.player import Player
from service.rollout.prompts.dataset import load_tasks
from service.rollout.step_sinks import StepColumns
from service.types import EvaluationId


async def play_shard(
    player: Player,
    name: str,
    tasks_file: Path,
    n_samples: int,
    shard: EvalShard,
    concurrency: int,
    temperature: float | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[EvalTrajectory]:
    """Play `n_samples` trajectories of every task in a shard, up to `concurrency` at the same time.

    `temperature`: the sampling temperature; None: as in training. `check`: called before each trajectory and after the
    last; if it raises an error, the evaluation ends. The environments' seeds depend only on the set's name and the
    prompt's uid.
    """
    tasks = await asyncio.to_thread(load_tasks, tasks_file)
    if temperature is not None:
        tasks = [replace(task, temperature=temperature) for task in tasks]
    running = asyncio.Semaphore(concurrency)

    async def play(row: int, sample: int) -> EvalTrajectory:
        columns, uid = StepColumns(), tasks[row].uid
        async with running:
            check()
            of, seed = EvaluationId(row, sample), f"eval/{name}/{uid}"
            end = await player.play_unmeasured(of, tasks[row], columns, seed)
        steps = columns.steps()
        n_tokens, n_truncated = int(steps.loss_mask_N.sum()), int(is_truncated_K(steps).sum())
        return EvalTrajectory(uid, end.reward, end.n_steps, n_tokens, end.stop_reason, n_truncated)

    rows = shard.rows(len(tasks))
    played = await asyncio.gather(*(play(row, sample) for row in rows for sample in range(n_samples)))
    check()
    return played
