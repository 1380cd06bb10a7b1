"""A text longer than the context, with and without notes that replace the history: reward and tokens of context.

    python -m benchmarks.compaction --output docs/compaction.png

The recipe `configs/compaction_tiny.yaml` in one process, three times from the same model: with compaction; without it,
in the same context; and without it in a context into which every text fits.
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
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from benchmarks.in_process import rounds, warm_started
from service.config import Config, load
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.steps.tables import total_lengths
from service.run.inputs import Prepared

RECIPE = Path(__file__).parent.parent / "configs" / "compaction_tiny.yaml"
WAYS = {
    "compaction": (),
    "no compaction": ("env.options.compact=false",),
    "no compaction, long context": ("env.options.compact=false", "generator.max_input_length=128"),
}
SHOWN = 10
"""Mini-batches over which rewards are averaged, and at the end also the tokens that attention reads."""


class Point(NamedTuple):
    """One mini-batch."""

    reward: float
    longest: int
    """Tokens of the longest prompt with its response: the context that is needed."""
    read: float
    """Tokens of all prompts and responses of a trajectory, on average: what attention reads without a prefix cache."""


async def curve(config: Config, steps: int, prepared: Prepared, model_folder: Path) -> list[Point]:
    """Train once; returns a point for each mini-batch."""
    points: list[Point] = []
    async with aclosing(rounds(config, steps, prepared, model_folder)) as training:
        async for groups in training:
            points.append(_point(groups))
            print(f"{config.env.options} {config.generator.max_input_length} {points[-1]}", file=sys.stderr)
    return points


def _point(groups: Sequence[CompleteGroup]) -> Point:
    rewards = [reward for group in groups for reward in group.ends.reward_E.tolist()]
    lengths = [length for group in groups for length in total_lengths(group.steps).tolist()]
    return Point(statistics.fmean(rewards), max(lengths), sum(lengths) / len(rewards))


def plot(curves: dict[str, list[Point]], path: Path) -> None:
    """Draw the reward of each mini-batch, its mean over `SHOWN` mini-batches, and the tokens of context."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, points in curves.items():
        rewards = [point.reward for point in points]
        (line,) = left.plot([statistics.fmean(rewards[max(0, i - SHOWN + 1) : i + 1]) for i in range(len(rewards))])
        left.plot(rewards, color=line.get_color(), alpha=0.25, linewidth=0.8)
        right.plot([point.longest for point in points], color=line.get_color(), label=name)
    left.set(xlabel="optimizer step", ylabel="reward", ylim=(0, 1))
    right.set(xlabel="optimizer step", ylabel="longest prompt with its response, tokens", ylim=(0, None))
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train in each way, print rewards and tokens as JSON, and draw the curves."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compaction", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=60, help="mini-batches of each training")
    parser.add_argument("--output", type=Path, help="write a picture of the curves to this file")
    parser.add_argument("overrides", nargs="*", help="settings, as for baton run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    own = ["trainer.ranks=1", "buffer.lookahead=0", *arguments.overrides]
    curves: dict[str, list[Point]] = {}
    with tempfile.TemporaryDirectory() as folder:
        started = warm_started(load([RECIPE], own).config, Path(folder))
        for name, settings in WAYS.items():
            config = load([RECIPE], [*own, *settings]).config
            curves[name] = asyncio.run(curve(config, arguments.steps, *started))
    for name, points in curves.items():
        rewards = [statistics.fmean(p.reward for p in points[i : i + SHOWN]) for i in range(0, len(points), SHOWN)]
        read, longest = statistics.fmean(p.read for p in points[-SHOWN:]), max(p.longest for p in points)
        print(json.dumps({"way": name, "rewards": rewards, "longest": longest, "read": read}))
    if arguments.output is not None:
        plot(curves, arguments.output)


if __name__ == "__main__":
    main()
