"""The plan of a configuration: whether it fits, how fast each split of the GPUs is, and what binds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from service.plan.machine.costs import CPU
from service.plan.machine.device import Device
from service.plan.settings import PlanSettings
from service.plan.split import Planner, Split, splits_of
from service.plan.step_seconds import Flow
from service.plan.weights import Update
from service.plan.work import Work


@dataclass(frozen=True)
class Forecast:
    """What `baton plan` says."""

    settings: PlanSettings
    device: Device
    gpus: int
    work: Work
    chosen: Split
    """The split of the configuration."""
    splits: tuple[Split, ...]
    """All splits of the GPUs, the configuration's among them where it uses them all."""
    on_policy: Flow
    """The chosen split with `buffer.lookahead: 0`."""
    engine_bytes: Mapping[str, float]
    """On each GPU of an engine, by part."""
    updates: Mapping[str, Update]
    problem: str | None
    """Why the configuration does not fit, and what would help."""

    @property
    def best(self) -> Split:
        """The fastest split that fits; the fastest of all where none does."""
        return min(self.splits, key=lambda split: (not split.fits, split.step_seconds))

    @property
    def gpu_hours(self) -> float:
        """Of the whole run, without its start."""
        return self.settings.max_steps * self.chosen.step_seconds * self.gpus / 3600


def forecast(settings: PlanSettings, folder: Path, device: Device, work: Work, gpus: int | None) -> Forecast:
    """The plan of a configuration on so many GPUs; None: as many as it uses.

    Raises:
        UserError: the model cannot be made or run, or there are too few GPUs.
    """
    each, transport = settings.generator.tensor_parallel_size, settings.weights.transport
    engines, ranks = settings.generator.max_engines, settings.trainer.ranks
    used = ranks if settings.fit.shares_gpus else engines * each + ranks
    gpus = gpus or used
    planner = Planner(settings, folder, device, work)
    chosen = planner.split(engines, ranks)
    splits = [chosen if pair == (engines, ranks) else planner.split(*pair) for pair in splits_of(settings, gpus)]
    weights = planner.shape.parameters * planner.shape.width / each
    parts = {"weights": weights, "kv cache": max(0.0, planner.memory.kv)}
    if device.cores is not None:
        parts["libraries"] = CPU["engine_bytes"]
    else:
        parts["graphs and buffers"] = max(0.0, planner.memory.engine - weights)
    problem = planner.problem
    if used > gpus and problem is None:
        problem = (
            f"generator.engines: {engines} engines of {each} GPUs and {ranks} ranks take {used}, {used - gpus} more "
            f"than --gpus {gpus}; lower one of them, see the best split"
        )
    transports = ("memory", "nccl", "ipc") if device.cores is None else (transport,)
    return Forecast(
        settings=settings,
        device=device,
        gpus=gpus,
        work=work,
        chosen=chosen,
        splits=tuple(splits),
        on_policy=planner.split(engines, ranks, lookahead=0).flow,
        engine_bytes=parts,
        updates={name: planner.update(name, engines, ranks) for name in transports},
        problem=problem,
    )
