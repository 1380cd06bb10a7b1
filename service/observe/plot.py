"""The learning curve as a picture: reward, staleness and padded length over the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.types import Float64s

INK = "#1f2430"
GRID = "#d9dce3"
_SHORT = {"async/staleness_mean": "mean", "generate/batch_padded_seq_len": "padded length of the batch"}
BLUE, ORANGE, GREEN, GREY = "#2a6fbb", "#d9822b", "#3a8f5c", "#8a91a0"


def draw_learning_curve(lines: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Three panels that share the step axis; a quantity that was not measured leaves its panel empty."""
    # Imported here: it costs a second that commands which draw nothing need not pay.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness, length = figure.subplots(3, 1, sharex=True, height_ratios=[2, 1, 1])
    steps_S = _series(lines, "trainer/global_step")
    _draw_reward(reward, steps_S, lines)
    _draw_band(
        staleness, steps_S, lines, "async/staleness_mean", ("async/staleness_max", "up to the oldest token"), ORANGE
    )
    staleness.set_ylabel("staleness\n(versions)")
    mean_length = ("generate/avg_num_tokens", "down to the mean response")
    _draw_band(length, steps_S, lines, "generate/batch_padded_seq_len", mean_length, GREEN)
    length.set_ylabel("padded length\n(tokens)")
    length.set_xlabel("optimizer step")
    if len(steps_S):
        length.set_xlim(steps_S[0] - 0.5, steps_S[-1] + 0.5)
    for axes in (reward, staleness, length):
        _dress(axes)
    figure.suptitle(title, color=INK, fontsize=13, fontweight="bold")
    figure.savefig(file)


def smooth(values_S: Float64s, window: int) -> Float64s:
    """The mean of the last `window` values at every step, fewer at the start; NaN counts as missing.

    >>> smooth(np.array([0.0, 1.0, 2.0, 3.0]), 2).tolist()
    [0.0, 0.5, 1.5, 2.5]
    """
    there_S = np.isfinite(values_S)
    sums_S = np.cumsum(np.where(there_S, values_S, 0.0))
    counts_S = np.cumsum(there_S)
    sums_S[window:] -= sums_S[:-window].copy()
    counts_S[window:] -= counts_S[:-window].copy()
    return np.where(counts_S > 0, sums_S / np.maximum(counts_S, 1), np.nan)


def _series(lines: Sequence[Mapping[str, Any]], key: str) -> Float64s:
    values = [line.get(key) for line in lines]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _draw_reward(axes: Any, steps_S: Float64s, lines: Sequence[Mapping[str, Any]]) -> None:
    reward_S = _series(lines, "reward/avg_raw_reward")
    axes.set_ylabel("mean reward")
    if not np.isfinite(reward_S).any():
        return
    tenth = max(1, len(reward_S) // 10)
    for key in sorted(key for key in lines[-1] if key.startswith("reward/avg_pass_at_"))[:1]:
        label = f"solved by one of {key.rsplit('_', 1)[1]}"
        axes.plot(steps_S, _series(lines, key), color=GREY, linewidth=1, label=label, **_marks(steps_S))
    axes.plot(steps_S, reward_S, color=BLUE, alpha=0.35, linewidth=1, label="a step", **_marks(steps_S))
    if tenth > 1:
        axes.plot(steps_S, smooth(reward_S, tenth), color=BLUE, linewidth=2.4, label=f"mean of the last {tenth}")
    first, last = reward_S[:tenth], reward_S[-tenth:]
    if np.isfinite(first).any() and np.isfinite(last).any():
        gain = f"first tenth {np.nanmean(first):.2f}, last tenth {np.nanmean(last):.2f}"
        axes.set_title(gain, color=INK, fontsize=10, loc="left")
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low) if low > -0.2 else low, 1.05 if 0.0 <= high <= 1.1 else high)
    _legend(axes)


def _draw_band(
    axes: Any, steps_S: Float64s, lines: Sequence[Mapping[str, Any]], key: str, other: tuple[str, str], color: str
) -> None:
    """A line, and a shade between it and the quantity `other` = (key, label)."""
    values_S, other_S = _series(lines, key), _series(lines, other[0])
    if not np.isfinite(values_S).any():
        return
    axes.plot(steps_S, values_S, color=color, linewidth=1.6, label=_SHORT.get(key), **_marks(steps_S))
    if np.isfinite(other_S).any():
        axes.fill_between(steps_S, values_S, other_S, color=color, alpha=0.18, linewidth=0, label=other[1])
    axes.set_ylim(0, max(float(np.nanmax([values_S, other_S])) * 1.1, 1.0))
    _legend(axes)


def _marks(steps_S: Float64s) -> dict[str, Any]:
    """A line needs two points; few points are marked so that they show."""
    return {"marker": "o", "markersize": 4} if len(steps_S) < 5 else {}


def _legend(axes: Any) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=9, frameon=False, labelcolor=INK, borderpad=0
    )


def _dress(axes: Any) -> None:
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=INK, labelsize=9)
    axes.yaxis.label.set_color(INK)
    axes.xaxis.label.set_color(INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
