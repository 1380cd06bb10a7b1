"""The learning curve as a picture: reward, staleness and padded length over the optimizer steps (axis `S`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.types import Float64s

Lines = Sequence[Mapping[str, Any]]
"""Lines of `metrics.jsonl`."""

GREY, GRID = "#8a91a0", "#d9dce3"
BLUE, ORANGE, GREEN = "#2a6fbb", "#d9822b", "#3a8f5c"

STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.borderpad": 0,
}


def draw_learning_curve(lines: Lines, file: Path, title: str) -> None:
    """Draw three panels that share the step axis; the panel of a quantity without values stays empty."""
    # Imported here: the import takes a second, which commands that draw nothing should not spend.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        reward, staleness, length = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
        _draw_reward(reward, lines)
        oldest = ("async/staleness_max", "up to the oldest token")
        _draw_band(staleness, lines, ("async/staleness_mean", "mean"), oldest, ORANGE)
        staleness.set_ylabel("staleness\n(versions)")
        mean_response = ("generate/avg_num_tokens", "down to the mean response")
        padded = ("generate/batch_padded_seq_len", "padded length of the batch")
        _draw_band(length, lines, padded, mean_response, GREEN)
        length.set_ylabel("padded length\n(tokens)")
        length.set_xlabel("optimizer step")
        length.xaxis.get_major_locator().set_params(integer=True)
        if lines:
            length.set_xlim(lines[0]["trainer/global_step"] - 0.5, lines[-1]["trainer/global_step"] + 0.5)
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
    """The mean reward of each step, its running mean, and pass@k."""
    steps_S, reward_S = _series(lines, "trainer/global_step"), _series(lines, "reward/avg_raw_reward")
    axes.set_ylabel("mean reward")
    if not np.isfinite(reward_S).any():
        return
    tenth = max(1, len(reward_S) // 10)
    for key in sorted(key for key in lines[-1] if key.startswith("reward/avg_pass_at_"))[:1]:
        _plot(axes, steps_S, _series(lines, key), f"solved by one of {key.rsplit('_', 1)[1]}", GREY, 1)
    _plot(axes, steps_S, reward_S, "a step", BLUE, 1, alpha=0.35)
    if tenth > 1:
        _plot(axes, steps_S, smooth(reward_S, tenth), f"mean of the last {tenth}", BLUE, 2.4)
    first, last = reward_S[:tenth], reward_S[-tenth:]
    if np.isfinite(first).any() and np.isfinite(last).any():
        gain = f"first tenth {np.nanmean(first):.2f}, last tenth {np.nanmean(last):.2f}"
        axes.set_title(gain, loc="left")
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low) if low > -0.2 else low, 1.05 if 0.0 <= high <= 1.1 else high)
    _add_legend(axes)


def _draw_band(axes: Any, lines: Lines, curve: tuple[str, str], edge: tuple[str, str], color: str) -> None:
    """A curve, and a shade between it and an edge; each is (key, label)."""
    steps_S, curve_S, edge_S = (_series(lines, key) for key in ("trainer/global_step", curve[0], edge[0]))
    if not np.isfinite(curve_S).any():
        return
    _plot(axes, steps_S, curve_S, curve[1], color, 1.6)
    if np.isfinite(edge_S).any():
        axes.fill_between(steps_S, curve_S, edge_S, color=color, alpha=0.18, linewidth=0, label=edge[1])
    axes.set_ylim(0, max(float(np.nanmax([curve_S, edge_S])) * 1.1, 1.0))
    _add_legend(axes)


def _series(lines: Lines, key: str) -> Float64s:
    values = [line.get(key) for line in lines]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _plot(axes: Any, steps_S: Float64s, values_S: Float64s, label: str, color: str, width: float, **more: Any) -> None:
    """A line; a few points have markers, because a line through one point shows nothing."""
    marker = "o" if len(steps_S) < 5 else None
    axes.plot(steps_S, values_S, label=label, color=color, linewidth=width, marker=marker, markersize=4, **more)


def _add_legend(axes: Any) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
