"""The error of a step that runs out of the device's memory; it names a level of gradient checkpointing that takes less
memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from service.errors import BatonError
from service.learn.model.policy import Policy
from service.learn.model.policy_model import Checkpointing


class OutOfMemory(BatonError):
    """Raised if a step ran out of the device's memory. `lighter`: the level of gradient checkpointing with which to
    continue; None if no level takes less memory."""

    def __init__(self, why: str, lighter: Checkpointing | None) -> None:
        super().__init__(why, lighter)
        self.lighter = lighter

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def naming_lack_of_memory(policy: Policy) -> Iterator[None]:
    """Within the block, turn the device's out-of-memory error into `OutOfMemory`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        (first, *_), lighter = str(error).splitlines() or [""], policy.lighter()
        held = f"{policy.checkpointing.layers} of {len(policy.model.layers)} layers kept their input only"
        better = f" ({lighter.layers} would take less)" if lighter is not None else ""
        raise OutOfMemory(f"rank {policy.rank} was out of memory, {held}{better}: {first}", lighter) from error
