"""The quick start with a reward for each useful look-up: optimizer steps to the same success, by kind of credit.

    python -m benchmarks.credit
    python -m benchmarks.credit env.options.look_up_reward=0.25 --seeds 0 1

A look-up that reads a fact of the solution for the first time is rewarded. The goal is reached when the last turn was
the right answer in three quarters of the trajectories of the last five mini-batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.examples.lookup import RELATION, Lookup, demonstrations, puzzle, vocabulary
from benchmarks.peer.baton_side import trained
from benchmarks.peer.slow_lookup import rows
from service.rollout.environment import Message, StepResult, Task

__all__ = ["RewardedLookup", "demonstrations", "rows", "vocabulary"]

ENVIRONMENT = "benchmarks.credit:RewardedLookup"
SETTINGS = ("--config", "configs/quickstart.yaml", f"env.name={ENVIRONMENT}", "env.trusted_modules=[benchmarks.credit]")
CREDITS = ("trajectory", "return_to_go")
WINDOW, GOAL = 5, 0.75


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
            return result._replace(info={"solved": result.reward})
        self._useful.remove(action)
        return result._replace(reward=self._look_up_reward)


def steps_to_goal(*settings: str) -> int:
    """Optimizer steps of a run until the goal is reached, or all of them."""
    with tempfile.TemporaryDirectory() as folder:
        _, lines = trained([*SETTINGS, "algorithm.returns=sum", "buffer.lookahead=0", *settings], Path(folder))
    solved = [line[f"environment/{ENVIRONMENT}/solved"] for line in lines]
    reached = (step for step in range(WINDOW, len(solved)) if statistics.fmean(solved[step - WINDOW : step]) >= GOAL)
    return next(reached, len(solved))


def main() -> None:
    """Run every seed with every credit, and print the optimizer steps and their medians as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.credit", description=main.__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("overrides", nargs="*", help="settings, as for baton run")
    arguments = parser.parse_args()
    steps: dict[str, list[int]] = {credit: [] for credit in CREDITS}
    for seed in arguments.seeds:
        for credit, counts in steps.items():
            counts.append(steps_to_goal(f"run.seed={seed}", f"algorithm.credit={credit}", *arguments.overrides))
            print(json.dumps({"steps": steps}), flush=True)
    print(json.dumps({"medians": {credit: statistics.median(counts) for credit, counts in steps.items()}}))


if __name__ == "__main__":
    main()
