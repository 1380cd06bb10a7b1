"""The learning curve as a picture: reward, staleness and padded length over the optimizer steps (axis `S`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.types import Float64s

REWARD = "reward/avg_raw_reward"
PANELS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("mean reward", {REWARD: "a step"}),
    ("staleness\n(versions)", {"async/staleness_mean": "mean", "async/staleness_max": "oldest token"}),
    (
        "padded length\n(tokens)",
        {"generate/batch_padded_seq_len": "of the batch", "generate/avg_num_tokens": "mean response"},
    ),
)
"""Label of each panel, and the keys of its curves with their names."""


def draw_learning_curve(lines: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Draw lines of `metrics.jsonl` as three panels that share the step axis. A curve without values is left out."""
    # Imported here, because the import takes a second, and most commands draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    marker = "o" if len(lines) < 5 else None  # a line through one point shows nothing
    for axes, (label, curves) in zip(panels, PANELS, strict=True):
        axes.set_ylabel(label)
        axes.grid(linewidth=0.4)
        for key, name in curves.items():
            steps_S, values_S = _curve(lines, key)
            if len(values_S):
                axes.plot(steps_S, values_S, label=name, marker=marker)
        if axes.lines and axes is not panels[0]:
            axes.set_ylim(bottom=0)
    steps_S, reward_S = _curve(lines, REWARD)
    if len(reward_S):
        tenth = max(1, len(reward_S) // 10)
        if tenth > 1:
            mean_S = np.convolve(reward_S, np.full(tenth, 1 / tenth), mode="valid")
            panels[0].plot(steps_S[tenth - 1 :], mean_S, label=f"mean of the last {tenth}", linewidth=2.4)
        for key in sorted(key for key in lines[-1] if key.startswith("reward/avg_pass_at_"))[:1]:
            panels[0].plot(*_curve(lines, key), label=f"solved by one of {key.rsplit('_', 1)[1]}", marker=marker)
        first, last = reward_S[:tenth].mean(), reward_S[-tenth:].mean()
        panels[0].set_title(f"first tenth {first:.2f}, last tenth {last:.2f}", loc="left")
    for axes in panels:
        if axes.lines:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(file)


def _curve(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[Float64s, Float64s]:
    """[S] the optimizer steps, and the values of `key`, of the lines that have a value for `key`."""
    points = [(line["trainer/global_step"], line[key]) for line in lines if line.get(key) is not None]
    steps_S, values_S = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps_S, values_S
