"""What the ranks of a sharded policy hold between micro-batches, and wait for during an export."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.tensor import DTensor

from service.errors import UserError
from service.learn.learner import Learner
from service.learn.model import policy, sharding
from service.learn.model.policy import Policy
from service.learn.model.sharding import local_shard, ranks_by_node
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, SHAPE, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_split import TRAJECTORIES, Outcome, outcome, reference

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

    model.register_forward_pre_hook(measure, prepend=True)  # before the weights are gathered
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
    """Export; rank 0's disk takes no byte before rank 1 has returned, for a minute. Whether rank 0 wrote then."""
    learner, returned, written = Learner(settings(), folder, CPU, rank, world_size), out / "returned", [True]

    def write_folder(*_: object) -> None:
        deadline = time.monotonic() + 60
        while not returned.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        written[0] = returned.exists()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "write_folder", write_folder)
        learner.export(out / "final")
    if rank == 1:
        returned.touch()
    return written[0]


def test_no_rank_waits_in_a_collective_for_the_disk_of_rank_0(model_folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, export_on_a_slow_disk, model_folder, tmp_path) == [True, True]


KEPT: dict[str, dict[str, Any]] = {
    "gathered again": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "gathered again, layers computed again": {"reshard_after_forward": True, "gradient_checkpointing": True},
    "kept, layers computed again": {"reshard_after_forward": False, "gradient_checkpointing": True},
    "offloaded": {"cpu_offload": True},
}


def in_units(rank: int, world_size: int, folder: Path, batch: MiniBatch) -> dict[str, tuple[list[str], Outcome]]:
    """The names of the units and the outcome of each of `KEPT`, with layers that are sharded although they are small.

    The KL term takes passes without gradients in between, of other weights.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SMALL_LAYER", 1)
        for name, trainer in KEPT.items():
            config = settings({"kl_coef": 5.0}, trainer={"ranks": world_size} | trainer, dtype="float64")
            model = Learner(config, folder, CPU, rank, world_size).policy.model
            units = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
            assert all(
                reduced_by(group) == [dist.ReduceOp.SUM] * 2
                for module in sharding._sharded(model)
                for group in module._get_fsdp_state()._fsdp_param_groups
            )
            found[name] = units, outcome(config, folder, batch, rank, world_size)
    return found


def reduced_by(group: Any) -> list[Any]:
    """How NCCL would reduce the float32 gradients of these parameters over ranks, and over copies of the model."""
    over = group._reduce_scatter_process_group
    given = group.gradient_divide_factor, group.force_sum_reduction_for_comms
    before, after, *operations = _get_gradient_divide_factors(over, None, torch.float32, "cuda", *given)
    assert (before, after) == (None, 1.0)
    return operations


@pytest.mark.parametrize("tied", [True, False])
def test_layers_embedding_and_head_are_gathered_one_by_one_and_gradients_only_added(
    model_folder: Path, tmp_path: Path, ranks: Ranks, tied: bool
) -> None:
    folder = model_folder if tied else untied(model_folder, tmp_path / "untied")
    rows = reference()
    expected = outcome(settings({"kl_coef": 5.0}, dtype="float64"), folder, mini_batch([[rows]], TRAJECTORIES))
    batch = mini_batch([[rows[:2], rows[2:]], [[], []]], TRAJECTORIES)
    layers = [f"model.layers.{number}" for number in range(SHAPE["num_hidden_layers"])]
    for results in ranks(2, in_units, folder, batch):
        for name, (units, found) in results.items():
            assert units == ["", *layers] if tied else ["", "model.embed_tokens", *layers, "lm_head"], name
            assert abs(found.loss - expected.loss) <= 1e-9 * expected.size, name
            assert np.linalg.norm(found.gradient - expected.gradient) <= 1e-9 * np.linalg.norm(expected.gradient), name


def untied(folder: Path, other: Path) -> Path:
    """A copy of the model with an output head of its own."""
    shutil.copytree(folder, other)
    described = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (other / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


def waits_for_a_late_rank(rank: int, world_size: int, seconds: float, deadline: float) -> str:
    """What a sum over all ranks ends with, if rank 1 is late."""
    sharding.set_collective_deadline(deadline)
    found = torch.ones(1)
    if rank == 1:
        time.sleep(seconds)
    try:
        dist.all_reduce(found)
    except RuntimeError as error:
        return "too late" if "imed out" in str(error) or "timeout" in str(error).lower() else f"failed: {error}"
    return f"{found.item():.0f}"


def test_a_collective_waits_for_a_late_rank_as_long_as_its_deadline(ranks: Ranks) -> None:
    assert ranks(2, waits_for_a_late_rank, 2.0, 60.0) == ["2", "2"]
    assert ranks(2, waits_for_a_late_rank, 4.0, 1.0)[0] == "too late"


NODES = ["a", "b", "a", "b"]


def steps_within(rank: int, world_size: int, folder: Path, parent: Path) -> dict[str, Any]:
    """A first step, and a second one after a resume, by ranks that shard over all and by ranks that shard within nodes.

    Each kind of ranks resumes from the other's checkpoint.
    """

    def learner(within: str) -> Learner:
        config = settings(trainer={"ranks": world_size, "shard_within": within})
        made = Policy(config, folder, CPU, rank, world_size, nodes=NODES)
        return Learner(config, folder, CPU, rank, world_size, made)

    batch = mini_batch([[made_rows(2, seed=seed)] for seed in range(world_size)], trajectories=2)
    found: dict[str, Any] = {}
    for within, other in (("all", "node"), ("node", "all")):
        first, second = learner(within), learner(other)
        reports = [first.step(batch)]
        first.save(parent / within)
        dist.barrier()
        second.load(parent / within)
        reports.append(second.step(batch))
        weights, masters = second.policy.weights(), first.policy.master_weights
        held = sum(master.numel() for master in masters.tensors.values())
        found[within] = {
            "steps": [report.metrics[f"policy/{name}"] for report in reports for name in ("policy_loss", "grad_norm")],
            "weights": [float(weight.double().square().sum()) for weight in (weights or {}).values()],
            "share": held / sum(parameter.numel() for parameter in masters.parameters.values()),
        }
    return found


def test_sharding_within_nodes_takes_the_same_steps_and_its_checkpoint_resumes_either_way(
    model_folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks(len(NODES), steps_within, model_folder, tmp_path)
    for found in results:
        assert found["node"]["steps"] == pytest.approx(found["all"]["steps"], rel=1e-4)
        assert found["node"]["weights"] == pytest.approx(found["all"]["weights"], rel=1e-5)
        assert found["all"]["share"] == pytest.approx(1 / 4, abs=0.1)
        assert found["node"]["share"] == pytest.approx(1 / 2, abs=0.1)
    assert results[0]["node"]["weights"]
    assert {file.name for file in (tmp_path / "node").glob("rank_*")} == {f"rank_{n}_of_2.safetensors" for n in (0, 1)}


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    assert ranks_by_node(NODES) == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match="the nodes have 2, 1"):
        ranks_by_node(NODES[:3])
