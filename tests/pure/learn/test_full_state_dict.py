"""Whole weights out of every rank's shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from service.learn.learner import Learner
from tests.pure.learn.builders import CPU, settings
from tests.pure.learn.ranks import Ranks


def gathered(rank: int, world_size: int, folder: Path, dtype: str) -> tuple[dict[str, str], dict[str, str] | None]:
    """A digest of every weight, gathered on this rank's device and on rank 0."""
    learner = Learner(settings(dtype=dtype), folder, CPU, rank, world_size)
    everywhere, whole = learner.policy.weights(everywhere=True), learner.policy.weights()
    assert all(tensor.is_contiguous() for tensor in everywhere.values())
    return digests(everywhere), None if whole is None else digests(whole)


def digests(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{w.dtype} {tuple(w.shape)} {w.double().flatten().tolist()}" for name, w in weights.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_gathers_on_its_device_what_rank_0_gathers_in_memory(
    model_folder: Path, ranks: Ranks, world_size: int, dtype: str
) -> None:
    (first, whole), *others = ranks(world_size, gathered, model_folder, dtype)
    assert first == whole and len(first) > 10
    assert others == [(first, None)] * (world_size - 1)
