"""The rates that a GPU reaches, as a profile: from its data sheet and from what kernels reach of it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from service.errors import UserError
from service.learn.estimate.meter import ATTENTION_BACKWARD_RATE, ATTENTION_RATE, BANDWIDTH, PRODUCT_RATE
from service.learn.estimate.step import PEAK_FLOPS

DATA_SHEETS = {
    # name: bfloat16 FLOP/s dense, bytes/s of its memory, bytes, bytes/s to another GPU of the node, and to the host
    "h100": (PEAK_FLOPS, 3.35e12, 80e9, 450e9, 64e9),
    "h200": (PEAK_FLOPS, 4.8e12, 141e9, 450e9, 64e9),
    "h20": (148e12, 4.0e12, 96e9, 450e9, 64e9),
    "a100": (312e12, 2.04e12, 80e9, 300e9, 32e9),
    "l40s": (362e12, 0.864e12, 48e9, 32e9, 32e9),
    "b200": (2250e12, 8.0e12, 180e9, 900e9, 64e9),
}
"""From the makers' data sheets, SXM modules where there are several, links in one direction."""

OF_PEAK, OF_BANDWIDTH = PRODUCT_RATE / PEAK_FLOPS, BANDWIDTH / 3.35e12
"""What large products and copies reach of an H100's data sheet; taken for every GPU."""
FORWARD_OF_PEAK, BACKWARD_OF_PEAK = ATTENTION_RATE / PEAK_FLOPS, ATTENTION_BACKWARD_RATE / PEAK_FLOPS
"""The same for attention, FlashAttention 2 on an H100."""
OF_LINK = 0.7
"""What collectives and copies reach of a link."""
NETWORK = 50e9
"""Bytes/s of a GPU to one of another node: 400 Gb/s InfiniBand for each."""


@dataclass(frozen=True)
class Device:
    """What a rank or a GPU of an engine computes and copies in a second, and what it holds."""

    name: str
    source: str
    memory: float
    """Bytes."""
    products: float
    """FLOP/s of matrix products."""
    bandwidth: float
    """Bytes/s of its own memory."""
    attention: float
    """FLOP/s of causal attention, forward."""
    attention_backward: float
    link: float
    """Bytes/s to another one of the same machine."""
    network: float
    host_link: float
    """Bytes/s to the memory of the host."""
    cores: int | None = None
    """CPU cores that all processes share; None: a GPU, which shares nothing."""
    pace: float = 1.0
    """Seconds of the work of a run's processes here, over those on the machine on which `service.plan.machine.host` was
    measured; of a GPU that is not measured, 1."""


def profile(name: str) -> Device:
    """The profile of a GPU.

    Raises:
        UserError: there is none of that name.
    """
    if name not in DATA_SHEETS:
        known = (*DATA_SHEETS, "cpu", "measured")
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--gpu {name}: no such profile; {hint}There are {', '.join(known)}")
    flops, bandwidth, memory, link, host_link = DATA_SHEETS[name]
    return Device(
        name=name,
        source=f"data sheet; products reach {OF_PEAK:.0%}, copies {OF_BANDWIDTH:.0%}, links {OF_LINK:.0%} of it",
        memory=memory,
        products=flops * OF_PEAK,
        bandwidth=bandwidth * OF_BANDWIDTH,
        attention=flops * FORWARD_OF_PEAK,
        attention_backward=flops * BACKWARD_OF_PEAK,
        link=link * OF_LINK,
        network=NETWORK * OF_LINK,
        host_link=host_link * OF_LINK,
    )
