"""Watches the memory of a run's processes: warns before a host runs out of memory, and names settings to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FULL = 0.85
"""Fraction of a host's memory above which the run warns; Ray kills processes at 0.95."""
REMEDIES = {
    "trainer": "lower trainer.max_tokens_per_micro_batch, set trainer.gradient_checkpointing, or take more ranks",
    "generator": "lower generator.concurrent_groups, or kv_cache_bytes (on a GPU gpu_memory_utilization)",
    "buffer": "lower buffer.max_bytes",
    "scorer": "give the scorer fewer workers or a smaller model",
    "role": "give the role a smaller model",
}
"""What to change if an actor needs too much memory, by the first word of the actor's name."""


class Memory(NamedTuple):
    """The memory of an actor's process and its children, and the memory of its host."""

    host: str
    n_bytes: int
    of: int
    """Total memory of the host, or of the container, in bytes."""


def remedy(actor: str) -> str:
    """Advice on what to change so that the process named `actor` (such as `generator-0`) needs less memory.

    >>> remedy("buffer")
    'lower buffer.max_bytes, or use a host with more memory'
    """
    return ", or ".join(filter(None, [REMEDIES.get(actor.partition("-")[0]), "use a host with more memory"]))


def advice(error: str, actor: str) -> str:
    """Advice on what to change after an actor's error that comes from a lack of memory; empty for any other error."""
    return f"; {remedy(actor)}" if "out of memory" in error or "allocate memory" in error else ""


def warning(there: Mapping[str, Memory]) -> str | None:
    """A warning if the actors of one host use nearly all of its memory; otherwise None."""
    used, (host, _, of) = sum(each.n_bytes for each in there.values()), next(iter(there.values()))
    if used <= FULL * of:
        return None
    largest = max(there, key=lambda name: there[name].n_bytes)
    return (
        f"WARNING host {host}: the run's processes have {in_gb(used)} of {in_gb(of)} of memory; the largest is "
        f"{largest} with {in_gb(there[largest].n_bytes)}: {remedy(largest)}"
    )


def in_gb(n_bytes: int) -> str:
    """A number of bytes as text in gigabytes.

    >>> in_gb(1_250_000_000)
    '1.2 GB'
    """
    return f"{n_bytes / 1e9:.1f} GB"
