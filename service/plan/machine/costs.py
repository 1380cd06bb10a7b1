"""What the parts of a run cost beside their models' operations; the numbers and their sources are in costs.toml."""

from __future__ import annotations

from pathlib import Path

import msgspec


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Cpu(_Part, frozen=True):
    """Costs on a CPU machine of the pace 1."""

    message: float
    iteration: float
    token: float
    turn: float
    forming_turn: float
    rank_step: float
    after_step: float
    processes_of_engine: float
    engine_bytes: float
    rank_bytes: float


class Gpu(_Part, frozen=True):
    """Costs on GPUs and their links."""

    iteration: float
    request: float
    all_reduce: float
    kernel_gaps: float
    of_link: float
    network: float


class Training(_Part, frozen=True):
    """Costs of the trainer."""

    imbalance: float
    checkpoint_bytes: float
    disk: float


class Weights(_Part, frozen=True):
    """Costs of an update of the engines."""

    copied: float
    to_a_node: float
    into_an_engine: float
    calls: float


class Costs(_Part, frozen=True):
    """All of them."""

    cpu: Cpu
    gpu: Gpu
    trainer: Training
    weights: Weights


COSTS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=Costs)
