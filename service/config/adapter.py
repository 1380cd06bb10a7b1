"""Settings of a low-rank adapter (LoRA), which is trained instead of the model's weights."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from service.config.section import Section

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A linear layer inside a decoder layer. The embedding and the output head are not allowed: an adapter would make tied
weights differ, and engine and trainer would disagree on log-probabilities."""

LINEAR: tuple[Target, ...] = get_args(Target)
ATTENTION = LINEAR[:4]

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of the adapter slots with which an engine can be started. A slot takes adapters up to its rank."""


def _named(targets: object) -> object:
    """Replace PEFT's word `all-linear` by the names of all linear layers; return other values unchanged."""
    return LINEAR if targets == "all-linear" else targets


class LoraConfig(Section):
    """A low-rank adapter: each target layer W computes x W^T + alpha / rank (x A^T) B^T; only A and B are trained."""

    rank: Annotated[int, Field(gt=0, le=SLOT_RANKS[-1])] = 16
    """Rank of the update: rows of A, columns of B."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The update is multiplied by `alpha` / `rank`."""
    targets: Annotated[tuple[Target, ...], Field(min_length=1), BeforeValidator(_named)] = LINEAR
    """Linear layers that get an update, in every decoder layer; `all-linear`: all of them."""

    @property
    def slot_rank(self) -> int:
        """Rank of the adapter slot with which the engine is started: the smallest one in `SLOT_RANKS` that is at least
        `rank`."""
        return next(rank for rank in SLOT_RANKS if rank >= self.rank)
