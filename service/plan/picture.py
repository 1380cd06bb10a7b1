"""A plan as one picture: what each split takes, and where the memory goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from service.learn.estimate.fit import MARGIN
from service.observe.plot import BLUE, GREEN, GREY, ORANGE, STYLE
from service.plan.binding import Side
from service.plan.forecast import Forecast


def draw(plan: Forecast, file: Path) -> None:
    """Draw the splits on the left, the bytes of a rank and of an engine's GPU on the right."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        speed, memory = figure.subplots(1, 2, width_ratios=[2, 1])
        _draw_splits(speed, plan)
        _draw_memory(memory, plan)
        figure.suptitle(f"{plan.config.run.name}: {plan.chosen.binding.sentence()}", fontsize=9)
        figure.savefig(file)


def _draw_splits(axes: Any, plan: Forecast) -> None:
    places = range(len(plan.splits))
    for offset, side, color in ((-0.2, Side.GENERATION, BLUE), (0.2, Side.TRAINING, ORANGE)):
        needed = [split.demand.seconds(side) for split in plan.splits]
        axes.bar([place + offset for place in places], needed, 0.4, color=color, label=f"{side} needs")
    axes.plot(places, [split.step_seconds for split in plan.splits], "o-", color=GREEN, label="a step takes")
    best = plan.splits.index(plan.best)
    place, said = (best, plan.best.step_seconds), "best" if plan.best.fits else "fastest"
    axes.annotate(said, place, xytext=(0, 8), textcoords="offset points", ha="center")
    labels = [f"{split.engines} + {split.ranks}" + ("" if split.fits else "\ndoes not fit") for split in plan.splits]
    axes.set_xticks(places, labels)
    axes.set_xlabel("engines + ranks")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
    axes.legend(loc="upper center", ncols=3)


def _draw_memory(axes: Any, plan: Forecast) -> None:
    for place, parts in enumerate((plan.chosen.rank_bytes, plan.engine_bytes)):
        below = 0.0
        for part, size in sorted(parts.items(), key=lambda held: -held[1]):
            axes.bar([place], [size / 1e9], 0.5, bottom=below / 1e9, edgecolor="white", color=BLUE)
            if size > 0.06 * plan.device.memory:
                axes.text(place, (below + size / 2) / 1e9, part, ha="center", va="center", color="white", fontsize=7)
            below += size
    axes.axhline(plan.device.memory * (1 - MARGIN) / 1e9, color=GREY, linestyle="--", label="can be used")
    axes.set_xticks([0, 1], ["a rank", "a GPU of\nan engine"])
    axes.set_ylabel("GB")
    axes.legend(loc="upper right")
