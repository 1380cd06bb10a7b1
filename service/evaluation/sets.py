"""Evaluation: sampled trajectories of fixed prompts, which the buffer never sees.

rewards of one prompt's 4 samples  1 0 0 1      avg_score 0.5
pass_at_1 = 0.5, pass_at_2 = 1 - C(2,2)/C(4,2) = 5/6, pass_at_4 = 1
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import comb
from statistics import fmean
from typing import Any, NamedTuple

from service.handoff.steps.stop_reason import FAILURES
from service.rollout.environment import Task
from service.types import Step, TrajectoryEnd, TrajectoryId

Play = Callable[[TrajectoryId, Task], AsyncGenerator[Step | TrajectoryEnd, None]]


@dataclass(frozen=True, slots=True)
class Played:
    """One evaluated trajectory."""

    prompt_uid: str
    reward: float
    n_turns: int
    n_tokens: int
    """Tokens that the policy sampled."""
    stop_reason: str

    @property
    def is_lost(self) -> bool:
        """It ended for a reason that says nothing about the policy."""
        return self.stop_reason in FAILURES


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the trajectories of one set came to; lost ones are counted and left out of every mean."""

    name: str
    avg_score: float
    pass_at: Mapping[int, float]
    avg_turns: float
    avg_tokens: float
    n_prompts: int
    n_trajectories: int
    n_lost: int
    stop_reasons: Mapping[str, int]

    def record(self) -> dict[str, Any]:
        """Everything as one JSON object."""
        return {
            "set": self.name,
            "avg_score": self.avg_score,
            **{f"pass_at_{k}": share for k, share in self.pass_at.items()},
            "avg_turns": self.avg_turns,
            "avg_tokens": self.avg_tokens,
            "prompts": self.n_prompts,
            "trajectories": self.n_trajectories,
            "lost_trajectories": self.n_lost,
            "stop_reasons": dict(self.stop_reasons),
        }

    def metrics(self) -> dict[str, float]:
        """The same under the tracker's names, per trajectory."""
        return {
            f"eval/{self.name}/avg_score": self.avg_score,
            **{f"eval/{self.name}/pass_at_{k}": share for k, share in self.pass_at.items()},
            f"eval/{self.name}/avg_turns": self.avg_turns,
            f"eval/{self.name}/avg_tokens": self.avg_tokens,
            f"eval/{self.name}/lost_trajectories": float(self.n_lost),
        }


class Part(NamedTuple):
    """The rows of a set that one of several players evaluates: every `of`-th, from `number` on."""

    number: int = 0
    of: int = 1
    most: int | None = None
    """Rows of the whole set that are evaluated at all; None: every row."""

    def rows(self, n: int) -> range:
        """The numbers of its rows, of `n`."""
        return range(self.number, n if self.most is None else min(n, self.most), self.of)


WHOLE = Part()


async def play_all(
    tasks: Sequence[Task], n_samples: int, play: Play, concurrency: int, part: Part = WHOLE
) -> list[Played]:
    """Play `n_samples` trajectories of every task of the part, at most `concurrency` at once.

    Ordinals are below zero, where no prompt that is trained has one.
    """
    running = asyncio.Semaphore(concurrency)

    async def one(row: int, sample: int) -> Played:
        async with running:
            return await _played(play, TrajectoryId(-1 - row, sample), tasks[row])

    ids = [(row, sample) for row in part.rows(len(tasks)) for sample in range(n_samples)]
    return list(await asyncio.gather(*(one(row, sample) for row, sample in ids)))


async def _played(play: Play, trajectory: TrajectoryId, task: Task) -> Played:
    n_tokens = 0
    async with aclosing(play(trajectory, task)) as items:
        async for item in items:
            if isinstance(item, TrajectoryEnd):
                return Played(task.uid, item.reward, item.n_steps, n_tokens, item.stop_reason)
            n_tokens += int(item.loss_mask.sum())
    raise ValueError(f"{trajectory} stopped without an end")


def summary(name: str, played: Sequence[Played]) -> Evaluation:
    """Means over trajectories, and over prompts for `pass_at`; a prompt is passed by any reward above 0."""
    kept = [trajectory for trajectory in played if not trajectory.is_lost]
    rewards: dict[str, list[float]] = {}
    for trajectory in kept:
        rewards.setdefault(trajectory.prompt_uid, []).append(trajectory.reward)
    return Evaluation(
        name=name,
        avg_score=_mean([trajectory.reward for trajectory in kept]),
        pass_at=_pass_at(list(rewards.values())),
        avg_turns=_mean([trajectory.n_turns for trajectory in kept]),
        avg_tokens=_mean([trajectory.n_tokens for trajectory in kept]),
        n_prompts=len({trajectory.prompt_uid for trajectory in played}),
        n_trajectories=len(played),
        n_lost=len(played) - len(kept),
        stop_reasons=Counter(trajectory.stop_reason for trajectory in played),
    )


def pass_at(k: int, n: int, passed: int) -> float:
    """The chance that one of `k` samples passes, drawn from `n` of which `passed` did."""
    return 1.0 - comb(n - passed, k) / comb(n, k)


def table(evaluations: Sequence[Evaluation]) -> str:
    """The evaluations as lines of a table."""
    head = ("set", "prompts", "trajectories", "score", "passed", "turns", "tokens", "lost")
    lines = [head, *(_cells(evaluation) for evaluation in evaluations)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cells(evaluation: Evaluation) -> tuple[str, ...]:
    return (
        evaluation.name,
        str(evaluation.n_prompts),
        str(evaluation.n_trajectories),
        f"{evaluation.avg_score:.3f}",
        " ".join(f"@{k} {share:.3f}" for k, share in evaluation.pass_at.items()) or "-",
        f"{evaluation.avg_turns:.2f}",
        f"{evaluation.avg_tokens:.1f}",
        str(evaluation.n_lost),
    )


def _pass_at(rewards: Sequence[Sequence[float]]) -> dict[int, float]:
    """For 1, 2, 4, ... up to the fewest samples that any prompt kept."""
    fewest = min(map(len, rewards), default=0)
    ks = sorted({1 << i for i in range(fewest.bit_length())} | {fewest}) if fewest else []
    return {
        k: _mean([pass_at(k, len(of), sum(reward > 0 for reward in of)) for of in rewards]) for k in ks if k <= fewest
    }


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
