"""What the processes of a run cost the CPU beside their model: per turn, per token, per step.

Measured on 2 x86-64 cores with the quick start: of each step with 300 turns of together 1100 sampled tokens, in CPU
milliseconds, vLLM's core 381, the generator's process 251, two ranks 146, the buffer 89, the driver 50, the rest 67.
"""

from __future__ import annotations

from service.plan.device import Device

TURNS = 300
"""Turns of a step of the quick start."""
CORE_REQUEST, CORE_TURN = 0.20e-3, 0.55e-3
"""CPU seconds of vLLM's core for a sampled token and for a turn; both together are its 381 ms, the parts assumed."""
CORE_ITERATION = 1.0e-3
GENERATOR_TURN = 0.251 / TURNS
FORMING_TURN = 0.012 / TURNS
"""Of the buffer's time, what lies between a mini-batch's last step and its lease, for a turn; the part is assumed."""
RANK_STEP, AFTER_STEP = 0.040, 0.090
"""CPU seconds of a rank for a step, beside its model's operations, until the commit; and of ranks and driver after it,
until the next lease is asked for: publication, metrics, messages. Set so that the quick start's waiting is met."""
PROCESSES_OF_ENGINE = 1.3
"""Cores that a busy generator takes: its core and its own process, which mostly wait for each other."""

ENGINE_BYTES, RANK_BYTES = 1.60e9, 0.52e9
"""Resident memory of a CPU engine's two processes and of a CPU rank before any model: libraries, as one run of
`python -m benchmarks.plan` measured them with the quick start."""


def crowding(
    device: Device, engines: int, ranks: int, share_of_training: float, shared_gpus: bool
) -> tuple[float, float]:
    """Factors by which generation and training take longer: processes share the cores of a CPU machine, and with
    `weights.transport: ipc` a rank and an engine share a GPU, of which each then has half.

    `share_of_training`: fraction of the time in which ranks compute.

    >>> from service.plan.device import profile
    >>> crowding(profile("h100"), 4, 4, 0.5, shared_gpus=False)
    (1.0, 1.0)
    >>> crowding(profile("h100"), 4, 4, 0.5, shared_gpus=True)
    (1.5, 2.0)
    """
    if device.cores is None:
        return (1.0 + share_of_training, 2.0) if shared_gpus else (1.0, 1.0)
    busy = PROCESSES_OF_ENGINE * engines
    return (
        max(1.0, (busy + ranks * share_of_training) / device.cores),
        max(1.0, (busy + ranks) / device.cores),
    )
