"""What the ranks of a sharded policy hold between micro-batches, and wait for during an export."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from service.learn.learner import Learner
from service.learn.model import policy
from service.learn.model.sharding import local_shard
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks

N_MICRO_BATCHES = 3


def gradient_shares(rank: int, world_size: int, folder: Path) -> list[float]:
    """The share of the whole float32 gradient that a rank holds when each micro-batch after the first begins."""
    learner = Learner(settings(), folder, CPU, rank, world_size)
    model, shares = learner.policy.model, []

    def measure(*_: object) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        held = sum(gradient.numel() for gradient in map(local_shard, filter(None.__ne__, gradients)))
        held += sum(gradient.numel() for gradient in whole_gradients(model))
        shares.append(held / sum(parameter.numel() for parameter in model.parameters()))

    model.register_forward_pre_hook(measure)
    micros = [made_rows(2, seed=seed) for seed in range(N_MICRO_BATCHES)]
    learner.accumulate(mini_batch([micros] * world_size, trajectories=2))
    return shares[1:]


def whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients that FSDP2 keeps unsharded until it reduces them."""
    groups = (module._get_fsdp_state()._fsdp_param_group for module in model.modules() if hasattr(module, "unshard"))
    kept = [each.unsharded_accumulated_grad for group in groups if group is not None for each in group.fsdp_params]
    return [gradient for gradient in kept if gradient is not None and not isinstance(gradient, DTensor)]


def test_a_rank_holds_the_gradient_of_its_shard_only_between_micro_batches(model_folder: Path, ranks: Ranks) -> None:
    for shares in ranks(2, gradient_shares, model_folder):
        assert len(shares) == N_MICRO_BATCHES - 1
        # shards are cut at whole rows, so a share may be a little more than half
        assert all(0.3 < share < 0.7 for share in shares)


def export_on_a_slow_disk(rank: int, world_size: int, folder: Path, out: Path) -> bool:
    """Export; rank 0's disk takes no byte before rank 1 has returned. Whether rank 0 wrote then."""
    learner, returned = Learner(settings(), folder, CPU, rank, world_size), out / "returned"

    def write_folder(*_: object) -> None:
        deadline = time.monotonic() + 120
        while not returned.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "write_folder", write_folder)
        learner.export(out / "final")
    if rank == 1:
        returned.touch()
    return returned.exists()


def test_no_rank_waits_in_a_collective_for_the_disk_of_rank_0(model_folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, export_on_a_slow_disk, model_folder, tmp_path) == [True, True]
