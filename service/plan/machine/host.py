"""What the processes of a run cost the CPU beside their model: per iteration, per turn, per token, per step.

Measured with the quick start on 2 x86-64 cores that did nothing else; how fast such work goes on elsewhere, or there
beside other work, is what `service.plan.machine.pace` measures. Of each step with 320 turns of together 1150 sampled
tokens, in CPU milliseconds: vLLM's core 162, the generator's process 121, two ranks 84, the buffer 32, the driver 15,
the rest 16. With two engines cores and generators took 457 together, with three 621: most of it is of an iteration.
"""

from __future__ import annotations

from service.plan.machine.device import Device

MESSAGE_SECONDS = 33e-6
"""What `service.plan.machine.pace` measured on that machine: the pace for which the costs below hold."""
ENGINE_ITERATION = 7e-3
"""Seconds of an iteration of vLLM's core, and of the generator's process that takes its tokens, where both have a core.
Set, with the two below, so that the seconds of a step with one, two and three engines are met."""
ENGINE_TOKEN, ENGINE_TURN = 0.02e-3, 0.3e-3
"""The same of a sampled token and of a turn, of both processes; how much is of which, by `gsm8k_tiny` with one turn of
11 tokens and `text_to_sql_tiny` with two of 14."""
FORMING_TURN = 0.005 / 320
"""Of the buffer's time, what lies between a mini-batch's last step and its lease, for a turn; the part is assumed."""
RANK_STEP, AFTER_STEP = 0.005, 0.015
"""CPU seconds of a rank for a step, beside its model's operations, until the commit; and of ranks and driver after it,
until the next lease is asked for: publication, metrics, messages. Set so that the driver's seconds are met."""
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

    >>> from service.plan.machine.device import profile
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
