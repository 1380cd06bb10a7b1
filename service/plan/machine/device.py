"""Profiles of GPUs: the rates of a GPU's data sheet, times the fractions of these rates that kernels reach."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from service.errors import UserError
from service.learn.estimate.gpus import DATA_SHEETS, GPUS_OF_A_NODE, H100, REACHED
from service.plan.machine.costs import CPU, GPU

MEASURED = ("cpu", "measured")
"""Names of this machine's own profiles, in addition to the names of data sheets."""


@dataclass(frozen=True)
class Device:
    """The memory of a rank's or engine's GPU, and the rates at which it computes and copies."""

    name: str
    source: str
    memory: float
    """Size of the memory, in bytes."""
    products: float
    """FLOP/s of matrix products."""
    bandwidth: float
    """Bytes/s of the GPU's own memory."""
    attention: float
    """FLOP/s of causal attention in a forward pass."""
    attention_backward: float
    link: float
    """Bytes/s to another GPU of the same machine."""
    network: float
    """Bytes/s of one network card, of which a node has one for each GPU."""
    host_link: float
    """Bytes/s to the memory of the host."""
    cores: int | None = None
    """Number of CPU cores that all processes share; None for a GPU."""
    pace: float = 1.0
    """Time that the work of a run's processes takes on this machine, relative to the machine on which costs.toml was
    measured; 1 for a GPU that is not measured."""

    @property
    def unit(self) -> str:
        """Plural name of what each rank occupies: GPUs, or processes on a CPU."""
        return "GPUs" if self.cores is None else "processes"

    def ring(self, gpus: int) -> float:
        """Bytes/s that each of `gpus` GPUs in a ring passes on; all network cards of a node share the traffic between
        nodes.

        >>> profile("h100").ring(8) == profile("h100").link
        True
        """
        return self.link if gpus <= GPUS_OF_A_NODE else min(self.link, GPUS_OF_A_NODE * self.network)


def profile(name: str) -> Device:
    """The profile of a GPU.

    Raises:
        UserError: no profile has that name.
    """
    if name not in DATA_SHEETS:
        known = (*DATA_SHEETS, *MEASURED)
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"--gpu {name}: no such profile; {hint}the profiles are {', '.join(known)}")
    sheet, of_link = DATA_SHEETS[name], GPU["of_link"]
    # assumes that every GPU reaches the same part of its data sheet as an H100
    of_peak, of_bandwidth = REACHED.products / H100.flops, REACHED.bandwidth / H100.bandwidth
    return Device(
        name=name,
        source=f"data sheet; matrix products reach {of_peak:.0%}, copies {of_bandwidth:.0%}, links {of_link:.0%} of it",
        memory=sheet.memory,
        products=sheet.flops * of_peak,
        bandwidth=sheet.bandwidth * of_bandwidth,
        attention=sheet.flops * REACHED.attention / H100.flops,
        attention_backward=sheet.flops * REACHED.attention_backward / H100.flops,
        link=sheet.link * of_link,
        network=GPU["network"] * GPU["of_network"],
        host_link=sheet.host_link * of_link,
    )


def crowding(
    device: Device, engines: int, ranks: int, share_of_training: float, shared_gpus: bool
) -> tuple[float, float]:
    """The factor by which generation takes longer, and the factor by which training takes longer, because engines and
    ranks share hardware: the cores on a CPU, and with `weights.transport: ipc` each GPU, half for each of the two.

    `share_of_training`: fraction of the time in which ranks compute; `shared_gpus`: whether the transport is `ipc`.

    >>> crowding(profile("h100"), 4, 4, 0.5, shared_gpus=False)
    (1.0, 1.0)
    >>> crowding(profile("h100"), 4, 4, 0.5, shared_gpus=True)
    (1.5, 2.0)
    """
    if device.cores is None:
        return (1.0 + share_of_training, 2.0) if shared_gpus else (1.0, 1.0)
    busy = CPU["processes_of_engine"] * engines
    return (
        max(1.0, (busy + ranks * share_of_training) / device.cores),
        max(1.0, (busy + ranks) / device.cores),
    )
