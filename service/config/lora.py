"""Settings of a low-rank adapter (LoRA), which is trained in place of the model's weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from service.config.section import Positive, Section

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
"""The linear layers inside of a decoder layer."""

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of the slots that an engine can be started with; a slot takes adapters of its rank and of lower ones."""


ALL = "all-linear"
"""PEFT's word for all of them."""


def _several(targets: object) -> object:
    if isinstance(targets, str) and targets not in LINEAR:
        raise ValueError(f"must be a list of {', '.join(LINEAR)} (all of them where it is left out)")
    return targets


class LoraConfig(Section):
    """A low-rank adapter: each target W computes x W^T + alpha / rank (x A^T) B^T, where only A and B are trained."""

    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """Factor of the update, divided by `rank`."""
    targets: Annotated[tuple[str, ...], BeforeValidator(_several)] = LINEAR
    """Linear layers that get an update, in every decoder layer."""

    @property
    def slot_rank(self) -> int:
        """Rank of the engine's slot that holds the adapter: the smallest one that is not below `rank`."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)
