"""The quick start with a reward for each useful look-up: optimizer steps to the same success, by kind of credit.

    python -m benchmarks.credit
    python -m benchmarks.credit --seeds 0 1 env.options.look_up_reward=0.25

The quick start's task, model, warm start and settings in one process: rollouts, mini-batches and optimizer steps take
turns, so there is neither Ray nor vLLM, and every token is fresh. A look-up that reads a fact of the solution for the
first time is rewarded. A run ends when the mean success of the last mini-batches reaches the goal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch

from baton.examples.lookup import RELATION, Lookup, demonstrations, puzzle, vocabulary
from baton.examples.lookup import rows as lookup_rows
from benchmarks.in_process import rounds, warm_started
from service.config import Config, load
from service.handoff.steps.tables import end_objects
from service.handoff.steps.values import StopReason
from service.rollout.environment import Message, StepResult, Task
from service.run.preparing.inputs import Prepared
from service.types import TrajectoryEnd

__all__ = ["RewardedLookup", "demonstrations", "rows", "vocabulary"]

RECIPE = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
CREDITS = ("trajectory", "return_to_go")
WINDOW = 5
"""Mini-batches over which success is averaged."""


class RewardedLookup(Lookup):
    """The look-up task, in which reading a fact of the solution for the first time is rewarded."""

    def __init__(self, look_up_reward: float = 1.0) -> None:
        super().__init__()
        self._look_up_reward = look_up_reward

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt."""
        drawn = puzzle(int(task.extra_info["seed"]))
        self._useful = {f"look {drawn.subject} {drawn.attribute}"}
        if drawn.hops == 2:
            self._useful.add(f"look {drawn.entity} {RELATION}")
        return await super().reset(task, seed)

    async def step(self, text: str) -> StepResult:
        """Look up a fact, or score an answer."""
        result, action = await super().step(text), " ".join(text.split())
        if action not in self._useful:
            return result
        self._useful.remove(action)
        return result._replace(reward=self._look_up_reward)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` dataset rows of the configured environment."""
    return [{**row, "env_class": ""} for row in lookup_rows(n, seed)]


async def steps_to(goal: float, config: Config, most: int, prepared: Prepared, model_folder: Path) -> int:
    """Optimizer steps until the mean success of the last `WINDOW` mini-batches is at least the goal; else `most`."""
    successes = list[float]()
    async with aclosing(rounds(config, most, prepared, model_folder)) as training:
        async for groups in training:
            successes.append(statistics.fmean(solved(end) for group in groups for end in end_objects(group.ends)))
            step = len(successes) - 1
            print(f"{config.algorithm.credit} {config.run.seed} {step}: {successes[-1]:.3f}", file=sys.stderr)
            if len(successes) >= WINDOW and statistics.fmean(successes[-WINDOW:]) >= goal:
                return step
    return len(successes)


def solved(end: TrajectoryEnd) -> bool:
    """Whether the last turn was the right answer: it is rewarded, and ends the trajectory by itself."""
    return end.reward == 1 and end.stop_reason == StopReason.STOP


def main() -> None:
    """Run every seed with every credit, and print the optimizer steps and their medians as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.credit", description=main.__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--goal", type=float, default=0.75, help="fraction of trajectories with the right answer")
    parser.add_argument("--most", type=int, default=100, help="optimizer steps after which a run is given up")
    parser.add_argument("overrides", nargs="*", help="settings, as for baton run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    own = ["env.name=benchmarks.credit:RewardedLookup", "env.trusted_modules=[benchmarks.credit]", "trainer.ranks=1"]
    own += ["algorithm.returns=sum", "buffer.lookahead=0", *arguments.overrides]
    steps: dict[str, list[int]] = {credit: [] for credit in CREDITS}
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            started = warm_started(load([RECIPE], [*own, f"run.seed={seed}"]).config, Path(folder))
            for credit in CREDITS:
                config = load([RECIPE], [*own, f"run.seed={seed}", f"algorithm.credit={credit}"]).config
                steps[credit].append(asyncio.run(steps_to(arguments.goal, config, arguments.most, *started)))
    medians = {credit: statistics.median(counts) for credit, counts in steps.items()}
    ratio = medians["return_to_go"] / medians["trajectory"]
    print(json.dumps({"steps": steps, "medians": medians, "return_to_go over trajectory": ratio}))


if __name__ == "__main__":
    main()
