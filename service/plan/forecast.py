"""The plan of a configuration: whether it fits, how fast each split of the GPUs is, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from service.config import Config
from service.errors import UserError
from service.plan.flow import Flow
from service.plan.machine.device import Device
from service.plan.machine.host import ENGINE_BYTES
from service.plan.split import Planner, Split
from service.plan.weights import Update
from service.plan.work import Work

MAX_SPLITS = 16
"""Splits of the GPUs that are compared; of more, these are spread evenly."""


@dataclass(frozen=True)
class Forecast:
    """What `baton plan` says."""

    config: Config
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
        return self.config.run.max_steps * self.chosen.step_seconds * self.gpus / 3600


def splits_of(config: Config, gpus: int) -> Iterator[tuple[int, int]]:
    """Numbers of engines and ranks that use all GPUs.

    Raises:
        UserError: there is none.
    """
    each = config.generator.tensor_parallel_size
    if config.weights.transport == "ipc":
        yield gpus, gpus
        return
    together, most = config.trainer.sequence_parallel, (gpus - 1) // each
    found = [engines for engines in range(1, most + 1) if (gpus - engines * each) % together == 0]
    if not found:
        raise UserError(
            f"--gpus {gpus}: an engine takes {each} (generator.tensor_parallel_size) and the trainer {together} or a "
            f"multiple of it (trainer.sequence_parallel); give {each + together} or more"
        )
    every = -(-len(found) // MAX_SPLITS)
    for engines in sorted({*found[::every], found[-1]}):
        yield engines, gpus - engines * each


def forecast(config: Config, folder: Path, device: Device, work: Work, gpus: int | None) -> Forecast:
    """The plan of a configuration on so many GPUs; None: as many as it uses.

    Raises:
        UserError: the model cannot be made or run, or there are too few GPUs.
    """
    generator, ranks = config.generator, config.trainer.ranks
    shared = config.weights.transport == "ipc"
    used = ranks if shared else generator.max_engines * generator.tensor_parallel_size + ranks
    gpus = gpus or used
    planner = Planner(config, folder, device, work)
    chosen = planner.split(generator.max_engines, ranks)
    splits = [
        chosen if pair == (generator.max_engines, ranks) else planner.split(*pair) for pair in splits_of(config, gpus)
    ]
    memory = planner.memory
    weights = planner.shape.parameters * planner.shape.width / generator.tensor_parallel_size
    parts = {"weights": weights, "kv cache": max(0.0, memory.kv)}
    if device.cores is not None:
        parts["libraries"] = ENGINE_BYTES
    else:
        parts["graphs and buffers"] = max(0.0, memory.engine - weights)
    problem = planner.problem
    transports = ("memory", "nccl", "ipc") if device.cores is None else (config.weights.transport,)
    if used > gpus and problem is None:
        problem = (
            f"generator.engines: {generator.max_engines} engines of {generator.tensor_parallel_size} GPUs and {ranks} "
            f"ranks take {used}, {used - gpus} more than --gpus {gpus}; lower one of them, see the best split"
        )
    return Forecast(
        config=config,
        device=device,
        gpus=gpus,
        work=work,
        chosen=chosen,
        splits=tuple(splits),
        on_policy=planner.split(generator.max_engines, ranks, lookahead=0).flow,
        engine_bytes=parts,
        updates={each: planner.update(each, generator.max_engines, ranks) for each in transports},
        problem=problem,
    )
