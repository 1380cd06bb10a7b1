"""Draws the rewards of several runs over each other.

python -m scripts.curves docs/harbor_tiny.png build/harbor_tiny/*.jsonl      copies of `metrics.jsonl`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def main(picture: str, *files: str) -> None:
    """Draw one curve for each file."""
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for file in map(Path, files):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [line["trainer/global_step"] for line in lines]
        axes.plot(steps, [line["reward/avg_raw_reward"] for line in lines], label=file.stem.replace("-", " "))
    axes.set(xlabel="optimizer step", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(linewidth=0.4)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
