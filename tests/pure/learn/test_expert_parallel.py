"""Ranks that divide the experts have the loss, metrics, gradients and steps of one rank, and write the same files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from service.config.lora import LoraConfig
from service.errors import UserError
from service.learn.learner import Learner
from service.learn.model.policy import Policy
from service.learn.model.sharding import Division, shard_rows
from service.learn.proof.exact import Exact, exactly
from service.learn.settings import LearnSettings
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_families import COMMON, EXPERTS, replayed
from tests.pure.learn.test_shared_prefix import PACKED, SHARED, TRAJECTORIES, configured, exact, moved, outcome
from tests.pure.learn.trees import tree_rows
from tests.pure.learn.varlen import eager_graphs

TOLERANCE = 1e-9
SEEDS = range(2)
MODEL: dict[str, Any] = COMMON | EXPERTS | {"num_experts": 8, "head_dim": 8, "norm_topk_prob": True}


class Case(NamedTuple):
    """How ranks train some mini-batches."""

    experts: int
    """Ranks that divide the experts."""
    way: str = "token_mean"
    layout: str = PACKED
    natively: float | None = None
    """Share of tokens that route natively while the others replay their experts; None: no experts are recorded."""
    sharing: int = 1
    """Ranks that share micro-batches."""
    nodes: int = 1
    trainer: tuple[tuple[str, Any], ...] = ()

    def config(self, world_size: int) -> LearnSettings:
        groups = {"sequence_parallel": self.sharing, "expert_parallel": self.experts}
        return configured(self.way, self.layout, "float64", ranks=world_size, **groups, **dict(self.trainer))

    def batch(self, seed: int, parts: int) -> MiniBatch:
        """Two micro-batches for each part, the last of them empty; all rows of a trajectory in one part."""
        rows = tree_rows(seed, TRAJECTORIES)
        of_part = [[row for row in rows if row.trajectory % parts == part] for part in range(parts)]
        ranks = [[mine[: len(mine) // 2], mine[len(mine) // 2 :]] for mine in of_part]
        ranks[-1] = [[row for micro in ranks[-1] for row in micro], []]
        batch = mini_batch(ranks, TRAJECTORIES)
        if self.natively is None:
            return batch
        natively = self.natively
        micros = tuple(tuple(recorded(micro, natively) for micro in micros) for micros in batch.ranks)
        return replace(batch, ranks=micros)


def recorded(micro: Any, natively: float) -> Any:
    """Experts by the token's id, so that it has the same ones on whichever rank it is."""
    drawn = replayed(micro, 3, 0.0).routed_experts_N
    assert drawn is not None
    ids_N = micro.token_ids_N
    first, second = (ids_N[:, None] + np.arange(3)) % 8, (3 * ids_N[:, None] + 1 + np.arange(3)) % 7
    experts = np.stack((first, np.where(second == first, 7 - (first == 7), second)), -1).astype(np.uint8)
    experts[ids_N % 10 < 10 * natively] = 255
    return replace(micro, routed_experts_N=experts)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MODEL, mlp_only_layers=[1])).save_pretrained(folder)
    return folder


def outcomes(rank: int, world_size: int, folder: Path, case: Case) -> list[tuple[dict[str, float], np.ndarray]]:
    """Metrics and gradient of each mini-batch, as a rank finds them."""
    nodes = [str(number * case.nodes // world_size) for number in range(world_size)]
    with pytest.MonkeyPatch.context() as patch, Exact():
        exact(patch)
        eager_graphs(patch)
        torch._dynamo.reset()
        config = case.config(world_size)
        policy = Policy(config, folder, CPU, rank, world_size, nodes=nodes)
        for layer in policy.model.layers:
            layer.forward = exactly(layer.forward)  # what is recomputed too
        learner = moved(config, folder, rank, world_size, policy)
        found = [outcome(learner, case.batch(seed, world_size // case.sharing)) for seed in SEEDS]
    return [(metrics, gradient.numpy()) for metrics, gradient in found]


def assert_those_of_one_rank(folder: Path, ranks: Ranks, world_size: int, case: Case) -> None:
    expected = outcomes(0, 1, folder, case._replace(experts=1, sharing=1, nodes=1, layout=PACKED, trainer=()))
    for of_rank in ranks(world_size, outcomes, folder, case):
        for (metrics, gradient), (other_metrics, other) in zip(of_rank, expected, strict=True):
            assert metrics == pytest.approx(other_metrics, rel=TOLERANCE, abs=TOLERANCE)
            assert np.linalg.norm(gradient - other) <= TOLERANCE * np.linalg.norm(other)


CHECKPOINTED, COMPILED, NODES = ("gradient_checkpointing", True), ("compile", True), ("shard_within", "node")


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, Case(1, natively=0.3)),
        (2, Case(2)),
        (2, Case(2, natively=0.3, layout=SHARED)),
        (4, Case(4, natively=0.0)),
        (4, Case(2, natively=0.3, trainer=(CHECKPOINTED,))),
        (4, Case(2, "gspo, proximal", SHARED, trainer=(CHECKPOINTED, NODES), nodes=2)),
        (4, Case(4, layout=SHARED, natively=0.3, sharing=2)),
        pytest.param(4, Case(2, "kl k3", trainer=(CHECKPOINTED, COMPILED)), marks=pytest.mark.full),
        pytest.param(4, Case(4, layout="padded", natively=0.5), marks=pytest.mark.full),
    ],
    ids=[
        "one rank",
        "two",
        "two, replayed, shared prefixes",
        "four, replayed",
        "two groups, recomputed",
        "copies on two nodes",
        "shared micro-batches",
        "compiled",
        "padded",
    ],
)
def test_ranks_that_divide_the_experts_have_the_loss_metrics_and_gradients_of_one(
    mixture: Path, ranks: Ranks, world_size: int, case: Case
) -> None:
    assert_those_of_one_rank(mixture, ranks, world_size, case)


def experts_of(count: int, world_size: int, **trainer: Any) -> LearnSettings:
    trainer |= {"ranks": world_size, "expert_parallel": count, "max_grad_norm": 1e-2}
    return settings(trainer=trainer, dtype="float64")


def stepped(learner: Learner, seed: int) -> dict[str, float]:
    batch = Case(1).batch(seed, learner.policy.n_batch_parts)
    with Exact():
        return learner.step(batch).metrics


def begun(rank: int, world_size: int, folder: Path, out: Path, experts: int) -> tuple[dict[str, float], int]:
    """Two clipped steps, a checkpoint and a folder; returns the metrics of the last step, and the rows that the rank
    published."""
    learner = Learner(experts_of(experts, world_size), folder, CPU, rank, world_size)
    metrics = [stepped(learner, seed) for seed in SEEDS][-1]
    learner.save(out / "checkpoint")
    learner.export(out / "final")
    whole = learner.weights(everywhere=True)
    assert whole is not None
    shards = learner.shards()
    assert shards.keys() == whole.keys()
    for name, (shape, first, rows) in shards.items():
        assert shape == tuple(whole[name].shape)
        assert torch.equal(rows, whole[name][first : first + len(rows)])
    return metrics, sum(rows.numel() for _, _, rows in shards.values())


def resumed(
    rank: int, world_size: int, folder: Path, checkpoint: Path, out: Path, experts: int, offload: bool
) -> dict[str, float]:
    """What a step after a checkpoint finds; writes a folder before it and one after it."""
    learner = Learner(experts_of(experts, world_size, cpu_offload=offload), folder, CPU, rank, world_size)
    learner.load(checkpoint)
    learner.export(out / "before")
    metrics = stepped(learner, 5)
    learner.export(out / "after")
    return metrics


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_steps_checkpoints_and_folders_are_those_of_one_rank_however_experts_are_divided(
    mixture: Path, ranks: Ranks, tmp_path: Path
) -> None:
    alone, _ = begun(0, 1, mixture, tmp_path / "alone", 1)
    found = ranks(4, begun, mixture, tmp_path / "two", 2)
    expected = weights_in(tmp_path / "alone" / "final")
    assert sum(published for _, published in found) == sum(weight.numel() for weight in expected.values())
    for metrics, _ in found:
        assert metrics["policy/grad_norm"] > 1e-2, "clipped"
        assert metrics == pytest.approx(alone, rel=TOLERANCE, abs=TOLERANCE)
    whole = weights_in(tmp_path / "two" / "final")
    assert whole.keys() == expected.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)
    checkpoint, after = tmp_path / "two" / "checkpoint", list[dict[str, float]]()
    for number, (world_size, experts, offload) in enumerate(
        [(1, 1, False), (4, 1, False), (4, 4, True), (2, 2, False)]
    ):
        out = tmp_path / str(number)
        after += ranks(world_size, resumed, mixture, checkpoint, out, experts, offload)
        read = weights_in(out / "before")
        assert read.keys() == whole.keys() and all(torch.equal(read[name], whole[name]) for name in whole)
        for name, weight in weights_in(out / "after").items():
            torch.testing.assert_close(weight, weights_in(tmp_path / "0" / "after")[name], rtol=0, atol=1e-10)
    for metrics in after:
        assert metrics == pytest.approx(after[0], rel=TOLERANCE, abs=TOLERANCE)


def adapted(rank: int, world_size: int, folder: Path, experts: int) -> list[dict[str, float]]:
    groups = {"ranks": world_size, "expert_parallel": experts}
    lora = LoraConfig(rank=4, targets=("q_proj", "o_proj"))
    learner = Learner(settings(trainer=groups, lora=lora, dtype="float64"), folder, CPU, rank, world_size)
    return [stepped(learner, seed) for seed in SEEDS]


def test_an_adapter_of_the_attention_is_trained_while_ranks_divide_the_frozen_experts(
    mixture: Path, ranks: Ranks
) -> None:
    expected = adapted(0, 1, mixture, 1)
    assert expected[0]["policy/grad_norm"] > 0
    for found in ranks(2, adapted, mixture, 2):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)


def rows_of(rank: int, world_size: int, folder: Path, experts: int) -> None:
    policy = Policy(experts_of(experts, world_size), folder, CPU, rank, world_size)
    for name, parameter in policy.master_weights.parameters.items():
        rows = slice(*policy.division.rows(name, len(parameter)))
        assert shard_rows(parameter) == rows
        assert len(policy.master_weights.tensors[name]) == rows.stop - rows.start


@pytest.mark.parametrize(("world_size", "experts"), [(4, 2), (4, 4), (2, 1)])
def test_a_checkpoint_knows_by_the_name_of_a_weight_which_rows_of_it_a_rank_has(
    mixture: Path, ranks: Ranks, world_size: int, experts: int
) -> None:
    ranks(world_size, rows_of, mixture, experts)
    rows = [Division(rank, 4, 2).rows("model.layers.0.mlp.experts.down_proj", 8) for rank in range(4)]
    assert rows == [(0, 2), (4, 6), (2, 4), (6, 8)]


def refusals(rank: int, world_size: int, folder: Path, dense: Path) -> list[str]:
    told = []
    for model, experts, nodes in ((folder, 2, "aab"), (folder, 3, "aaa"), (dense, 3, "aaa")):
        with pytest.raises(UserError) as caught:
            Policy(experts_of(experts, world_size), model, CPU, rank, world_size, nodes=list(nodes))
        told.append(str(caught.value))
    return told


def test_ranks_nodes_or_experts_that_do_not_divide_are_refused(mixture: Path, model_folder: Path, ranks: Ranks) -> None:
    for groups, experts, dense in ranks(3, refusals, mixture, model_folder):
        assert groups.startswith(
            "trainer.expert_parallel: the 3 ranks of a copy of the policy do not divide into group"
        )
        assert experts == (
            "trainer.expert_parallel: 3 ranks cannot divide the model's 8 experts among themselves; use a divisor"
        )
        assert dense == "trainer.expert_parallel: the model has no experts to divide; use 1"
