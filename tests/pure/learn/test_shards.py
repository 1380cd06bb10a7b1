"""Each rank's rows of what is published are together the weights that a gathering of all finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from service.config.adapter import LoraConfig
from service.learn.learner import Learner
from service.learn.model.policy import Policy
from tests.pure.learn.builders import CPU, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_families import saved

NODES = ["a", "b", "a", "b"]


def both(rank: int, world_size: int, folder: Path, model: dict[str, Any], within: str) -> tuple[Any, Any]:
    """What this rank holds, by name: shape, first row and rows; and the gathered weights, on rank 0."""
    config = settings(trainer={"ranks": world_size, "shard_within": within}, **model)
    nodes = NODES[:world_size] if within == "node" else None
    learner = Learner(config, folder, CPU, rank, world_size, Policy(config, folder, CPU, rank, world_size, nodes=nodes))
    policy = learner.policy
    rows = policy.shards().items()
    held = {name: (each.shape, each.first, each.rows.to(policy.dtype).tolist()) for name, each in rows}
    whole = policy.weights()
    return held, None if whole is None else {name: tensor.tolist() for name, tensor in whole.items()}


def assert_together(results: list[tuple[Any, Any]]) -> None:
    whole = results[0][1]
    for held, _ in results:
        assert list(held) == list(whole), "every rank knows all names, in one order"
    for name, expected in whole.items():
        rows = []
        for shape, first, of_rank in sorted((held[name] for held, _ in results), key=lambda part: part[1]):
            assert shape == torch.tensor(expected).shape
            assert not of_rank or first == len(rows)
            rows += of_rank
        assert rows == expected, name


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("model", [{}, {"dtype": "bfloat16"}, {"lora": LoraConfig(rank=3)}], ids=str)
def test_the_rows_of_all_ranks_are_the_weights(
    model_folder: Path, ranks: Ranks, world_size: int, model: dict[str, Any]
) -> None:
    assert_together(ranks(world_size, both, model_folder, model, "all"))


def test_the_rows_of_experts_are_whole_weights_of_some_experts(tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(4, both, saved("qwen3_moe", tmp_path), {}, "all")
    assert_together(results)
    of_first = [len(rows) for name, (_, _, rows) in results[0][0].items() if ".experts." in name]
    assert set(of_first) > {0} and sum(map(bool, of_first)) == len(of_first) / 3, "2 of 6 experts"


def test_where_nodes_hold_copies_the_ranks_of_one_copy_have_all(model_folder: Path, ranks: Ranks) -> None:
    results = ranks(4, both, model_folder, {}, "node")
    assert_together(results)
    assert [any(rows for _, _, rows in held.values()) for held, _ in results] == [True, False, True, False]


def test_gathered_weights_are_copies_that_training_does_not_change_and_rows_are_none(model_folder: Path) -> None:
    learner = Learner(settings(), model_folder, CPU, 0, 1)

    def published() -> list[torch.Tensor]:
        whole = learner.policy.weights(everywhere=True)
        assert whole is not None
        return [*whole.values()]

    kept = published()
    before = [tensor.clone() for tensor in kept]
    rows = [of_rank.rows for of_rank in learner.policy.shards().values()]
    copies = [of_rank.clone() for of_rank in rows]
    with torch.no_grad():
        for tensor in learner.policy.master_weights.tensors.values():
            tensor.add_(1)
    learner.policy.master_weights.write_back()
    assert not any(map(torch.equal, rows, copies)), "a rank copies them once, into its buffer"
    assert all(map(torch.equal, kept, before)) and not any(map(torch.equal, published(), before))
