"""The learning curve as a picture: reward, staleness and padded length over the optimizer steps (axis `S`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.types import Float64s

Lines = Sequence[Mapping[str, Any]]
"""Lines of `metrics.jsonl`."""

GREY, BLUE, ORANGE, GREEN = "#8a91a0", "#2a6fbb", "#d9822b", "#3a8f5c"
STYLE = {
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "grid.linewidth": 0.4,
    "legend.frameon": False,
}
BANDS = (
    ("staleness\n(versions)", ORANGE, "async/staleness_mean", "mean", "async/staleness_max", "up to the oldest token"),
    (
        "padded length\n(tokens)", GREEN, "generate/batch_padded_seq_len", "padded length of the batch",
        "generate/avg_num_tokens", "down to the mean response",
    ),
)  # fmt: skip
"""Panels below the reward: (label, colour, key and label of the curve, key and label of the other edge of the band)."""


def draw_learning_curve(lines: Lines, file: Path, title: str) -> None:
    """Draw three panels that share the step axis; the panel of a quantity without values stays empty."""
    # Imported here: the import takes a second, which commands that draw nothing should not wait for.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        reward, *bands = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
        _draw_reward(reward, lines)
        for axes, (label, color, *band) in zip(bands, BANDS, strict=True):
            axes.set_ylabel(label)
            _draw_band(axes, lines, color, *band)
        bands[-1].set_xlabel("optimizer step")
        bands[-1].xaxis.get_major_locator().set_params(integer=True)
        figure.suptitle(title, fontsize=13, fontweight="bold")
        figure.savefig(file)


def smooth(values_S: Float64s, window: int) -> Float64s:
    """The mean of the last `window` values at every step, fewer at the start; NaN counts as missing.

    >>> smooth(np.array([0.0, 1.0, 2.0, 3.0]), 2).tolist()
    [0.0, 0.5, 1.5, 2.5]
    """
    present_S = np.isfinite(values_S)
    sums_S = np.cumsum(np.where(present_S, values_S, 0.0))
    counts_S = np.cumsum(present_S)
    sums_S[window:] -= sums_S[:-window].copy()
    counts_S[window:] -= counts_S[:-window].copy()
    return np.where(counts_S > 0, sums_S / np.maximum(counts_S, 1), np.nan)


def _draw_reward(axes: Any, lines: Lines) -> None:
    """Draw the mean reward of each step, its running mean, and pass@k."""
    axes.set_ylabel("mean reward")
    reward_S = _series(lines, "reward/avg_raw_reward")
    if not np.isfinite(reward_S).any():
        return
    tenth = max(1, len(reward_S) // 10)
    for key in sorted(key for key in lines[-1] if key.startswith("reward/avg_pass_at_"))[:1]:
        _plot(axes, lines, _series(lines, key), f"solved by one of {key.rsplit('_', 1)[1]}", GREY)
    _plot(axes, lines, reward_S, "a step", BLUE, alpha=0.35)
    if tenth > 1:
        _plot(axes, lines, smooth(reward_S, tenth), f"mean of the last {tenth}", BLUE, linewidth=2.4)
    first, last = reward_S[:tenth], reward_S[-tenth:]
    if np.isfinite(first).any() and np.isfinite(last).any():
        axes.set_title(f"first tenth {np.nanmean(first):.2f}, last tenth {np.nanmean(last):.2f}", loc="left")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)


def _draw_band(axes: Any, lines: Lines, color: str, key: str, label: str, edge: str, edge_label: str) -> None:
    """Draw a curve, with a shaded band between it and an edge."""
    curve_S, edge_S = _series(lines, key), _series(lines, edge)
    if not np.isfinite(curve_S).any():
        return
    _plot(axes, lines, curve_S, label, color, linewidth=1.6)
    steps_S = _series(lines, "trainer/global_step")
    axes.fill_between(steps_S, curve_S, edge_S, color=color, alpha=0.18, linewidth=0, label=edge_label)
    axes.set_ylim(0, max(float(np.nanmax([curve_S, edge_S])) * 1.1, 1.0))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)


def _series(lines: Lines, key: str) -> Float64s:
    return np.array([np.nan if line.get(key) is None else line[key] for line in lines], dtype=np.float64)


def _plot(axes: Any, lines: Lines, values_S: Float64s, label: str, color: str, **more: Any) -> None:
    """Draw a line; a few points get markers, because a line through one point shows nothing."""
    marker = "o" if len(lines) < 5 else None
    axes.plot(_series(lines, "trainer/global_step"), values_S, label=label, color=color, marker=marker, **more)
