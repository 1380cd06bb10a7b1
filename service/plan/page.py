"""Shows a plan as a page for the terminal, or as a dictionary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from service.learn.estimate.fit import MARGIN
from service.observe.summary import duration
from service.plan.binding import Part, Side
from service.plan.forecast import Plan, Split
from service.plan.machine.costs import listed
from service.plan.work import lines_of

LEAST_BYTES = 5e6
"""The page names only the parts of the memory that have at least this many bytes."""
SLOW_PACE = 2.0
"""If the measured `Device.pace` is above this value, the page's first line shows it."""
EXPERTS = "experts: published micro-batches took 2 to 14 times as long as predicted; see docs/plan.md"
MODEL = (
    "Times are arithmetic: the operations of a step at the device's rates, a roofline for each iteration of an engine, "
    "and what admission, slots and trainer let through."
)


def lines(plan: Plan) -> Iterator[str]:
    """The lines of the page that shows a plan on a terminal."""
    split, settings = plan.chosen, plan.settings
    parallel = settings.generator.engine_gpus
    engines = _count(split.engines, "engine") + (f" of {parallel} GPUs" if parallel > 1 else "")
    where = f"{settings.name} on {plan.gpus} {plan.device.unit} ({plan.device.name})"
    pace = plan.device.pace
    slow = f"; this machine is busy or slow: its processes take {pace:.1f} times as long as usual"
    fewer = f" ({plan.used} {plan.device.unit}; the figures above the table are for them)"
    of = "" if plan.used == plan.gpus else fewer
    yield f"{where}; configured: {engines}, {_count(split.ranks, 'rank')}{of}{slow if pace > SLOW_PACE else ''}"
    yield ""
    yield from _memory(plan)
    yield ""
    yield from _speed(plan)
    yield ""
    yield f"{'engines':>10} {'ranks':>6} {'s/step':>8} {'training waits':>15} {'slots idle':>11}  fits  binds"
    for each in plan.splits:
        mark = "*" if each is plan.best else " "
        yield (
            f"{mark} {each.engines:>8} {each.ranks:>6} {_short(each.step_seconds):>8} {each.flow.trainer_waits:>15.0%} "
            f"{each.flow.generators_wait:>11.0%}  {'yes ' if each.fits else 'no  '}  "
            f"{each.binding.part if each.binding.is_bottleneck else '-'}{'  (configured)' if each is split else ''}"
        )
    best = plan.best
    gain = round(split.step_seconds / best.step_seconds, 2)
    times = "as fast as" if gain == 1 else f"{gain:.2f} times as fast as"
    speed = f"{_short(best.step_seconds)} s a step, {times}"
    name = "best split (*)" if best.fits else "no split fits; the fastest (*) if they did"
    yield f"{name}: {_count(best.engines, 'engine')}, {_count(best.ranks, 'rank')}, {speed} the configuration's"
    yield ""
    yield "assumptions"
    costs = listed() if plan.device.cores is None else ()
    for line in (f"rates: {plan.device.source}", *costs, *lines_of(plan.work), MODEL):
        yield f"  {line}"


def _short(seconds: float) -> str:
    """Seconds with two decimals; below 0.1 s with two significant digits, so that only zero is shown as 0.

    >>> _short(2.5), _short(0.004321), _short(0.0)
    ('2.50', '0.0043', '0')
    """
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number > 1)


def _memory(plan: Plan) -> Iterator[str]:
    room = plan.device.memory * (1 - MARGIN)
    for name, parts in (("a rank", plan.chosen.rank_bytes), ("a GPU of an engine", plan.engine_bytes)):
        held = sum(parts.values())
        largest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in largest if size >= LEAST_BYTES)
        yield f"memory of {name}: {held / 1e9:.1f} GB of {room / 1e9:.1f} that can be used ({named})"
    yield "it fits" if plan.problem is None else f"it does not fit: {plan.problem}"


def _speed(plan: Plan) -> Iterator[str]:
    split, flow = plan.chosen, plan.chosen.flow
    yield f"engines: {split.sampled_tokens:,.0f} sampled and {split.prefilled_tokens:,.0f} prefilled tokens a second"
    yield f"trainer: {split.trained_tokens:,.0f} tokens of rows a second"
    if plan.has_experts:
        yield f"  {EXPERTS}"
    for side in Side:
        parts = ", ".join(f"{part} {_short(seconds)}" for part, seconds in split.demand.of(side).items() if seconds)
        yield f"{side}: {_short(split.demand.seconds(side))} s of a step ({parts})"
    gain = plan.on_policy.step_seconds / flow.step_seconds
    yield (
        f"a step: {_short(flow.step_seconds)} s, {gain:.2f} times as fast as on-policy; "
        f"staleness {flow.staleness:.1f} versions; {_count(round(flow.running), 'request')} in an engine"
    )
    yield f"what binds: {split.binding.sentence()}"
    for transport, update in plan.updates.items():
        used = " (configured)" if transport == plan.settings.weights.transport else ""
        yield (
            f"weights by {transport}{used}: the trainer waits {_short(update.trainer)} s, an engine pauses "
            f"{_short(update.pause)} s, served after {_short(update.arrival)} s"
        )
    yield f"journal: {plan.journal_bytes / 1e9:.2g} GB a step, {plan.journal_token_bytes} bytes a token"
    steps = plan.settings.max_steps
    hours = plan.gpu_hours
    rented = "" if hours is None else f", {hours:,.0f} GPU-hours" if hours >= 10 else f", {hours:.2g} GPU-hours"
    yield f"the run: {steps} steps, {duration(steps * flow.step_seconds)} without its start{rented}"


def as_dict(plan: Plan) -> dict[str, Any]:
    """The figures of the page as JSON values; lengths in tokens, times in seconds, memory in bytes."""
    work = asdict(plan.work)
    sources = work.pop("sources")
    return {
        "schema": 1,
        "name": plan.settings.name,
        "fits": plan.problem is None,
        "problem": plan.problem,
        "gpus": plan.gpus,
        "device": asdict(plan.device),
        "engine_bytes": plan.engine_bytes,
        "chosen": _split(plan.chosen),
        "best": {"engines": plan.best.engines, "ranks": plan.best.ranks},
        "splits": [_split(split) for split in plan.splits],
        "speed_over_on_policy": plan.on_policy.step_seconds / plan.chosen.step_seconds,
        "weights": {transport: asdict(update) for transport, update in plan.updates.items()},
        "journal_bytes": plan.journal_bytes,
        "gpu_hours": plan.gpu_hours,
        "work": work,
        "sources": sources,
    }


def _split(split: Split) -> dict[str, Any]:
    found = split.binding

    def named(parts: Mapping[Part, float]) -> dict[str, float]:
        return {str(part): seconds for part, seconds in parts.items()}

    return {
        "engines": split.engines,
        "ranks": split.ranks,
        "fits": split.fits,
        **asdict(split.flow),
        "generation": named(split.demand.generation),
        "training": named(split.demand.training),
        "sampled_tokens_per_second": split.sampled_tokens,
        "prefilled_tokens_per_second": split.prefilled_tokens,
        "trained_tokens_per_second": split.trained_tokens,
        "rank_bytes": dict(split.rank_bytes),
        "binding": {"part": str(found.part), "gain": found.gain, "sentence": found.sentence()},
    }
