"""A loss of a user's own that finds no memory at some steps of one rank, as on a GPU that is nearly full."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from service.config.learn import AlgorithmConfig
from service.learn.losses.policy_losses import LossInputs, LossTerms, policy_loss, ppo_clip

FOLDER = "BATON_TEST_SHORT_OF_MEMORY"
"""Names the folder in which each lack of memory leaves a file."""
CALLS = (1, 10, 4)
"""Calls, of the first process of rank 1 and of those that follow it, that find no memory."""

_called = 0


@policy_loss("short_of_memory")
def short_of_memory(inputs: LossInputs, settings: AlgorithmConfig) -> LossTerms:
    """The clipped loss."""
    global _called
    _called += 1
    folder = Path(os.environ[FOLDER])
    lacked = len(list(folder.iterdir()))
    if dist.get_rank() == 1 and lacked < len(CALLS) and _called == CALLS[lacked]:
        (folder / str(lacked)).touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return ppo_clip(inputs, settings)
