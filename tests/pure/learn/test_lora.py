"""A low-rank adapter: the same gradients as through merged weights, in every layout, on any number of ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.config.learn import ATTENTION, LoraConfig
from service.errors import UserError
from service.learn.learner import Learner
from service.learn.model.lora import A, B
from service.learn.settings import LearnSettings
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings, with_supports
from tests.pure.learn.families import saved
from tests.pure.learn.outcomes import (
    TRAJECTORIES,
    Outcome,
    assert_same,
    batch_in,
    cut,
    exact,
    outcome,
    reference,
)
from tests.pure.learn.ranks import Ranks

LORA = LoraConfig(rank=4, alpha=6.0)
IN_ATTENTION = LORA.model_copy(update={"targets": ATTENTION})
KL: dict[str, Any] = {"kl_coef": 0.5, "kl_estimator": "k2", "entropy_coef": 0.01}


def learner(config: LearnSettings, folder: Path, rank: int = 0, world_size: int = 1, moved: bool = True) -> Learner:
    """A learner whose adapter is not nothing any more, the same on any number of ranks."""
    made = Learner(config, folder, CPU, rank, world_size)
    if moved and config.model.lora is not None:
        policy = made.policy
        for name, master in policy.master_weights.tensors.items():
            if name.endswith(B):
                rows = torch.arange(policy.master_weights.parameters[name].shape[0], dtype=torch.float64)
                first = rank * -(-len(rows) // world_size)
                columns = torch.arange(master.shape[1], dtype=torch.float64)
                values = torch.sin(3 * rows[:, None] + columns) / 10
                master.copy_(values[first : first + len(master)])
        policy.master_weights.write_back()
    return made


def gradients(made: Learner) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in made.policy.model.named_parameters() if p.grad is not None}


def lora_of(folder: Path) -> LoraConfig:
    return IN_ATTENTION if folder.name.endswith("moe") else LORA


def test_the_gradients_are_those_of_the_merged_weights_by_the_chain_rule(family: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    batch = replace(batch, ranks=((with_supports(batch.ranks[0][0]),),))
    lora = lora_of(family)
    ours = learner(settings(trainer={"gradient_checkpointing": True}, dtype="float64", lora=lora), family)
    theirs = learner(settings(dtype="float64"), family)
    masters, whole = ours.policy.master_weights.tensors, theirs.policy.master_weights
    scale = lora.alpha / lora.rank
    with torch.no_grad():
        for name in masters:
            if name.endswith(A):
                module = name.removesuffix(A)
                whole.tensors[module + ".weight"] += scale * masters[module + B] @ masters[name]
    whole.write_back()
    losses = [one.accumulate(batch).totals()["loss"] for one in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    found, of_weight = gradients(ours), gradients(theirs)
    assert found.keys() == masters.keys()
    for name in masters:
        end = A if name.endswith(A) else B
        module = name.removesuffix(end)
        gradient = scale * of_weight[module + ".weight"]
        a, b = masters[module + A], masters[module + B]
        expected = b.T @ gradient if end == A else gradient @ a.T
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)


def test_an_adapter_begins_as_nothing_and_only_it_is_trained(family: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    ours = learner(settings(lora=lora_of(family)), family, moved=False)
    plain = learner(settings(), family)
    assert ours.accumulate(batch).totals()["loss"] == plain.accumulate(batch).totals()["loss"]
    ours.policy.master_weights.drop_gradients()
    before = {name: p.detach().clone() for name, p in ours.policy.model.named_parameters()}
    losses = [ours.step(batch).metrics["policy/policy_loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    changed = {name for name, p in ours.policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.endswith((A, B))}


def of_rank(rank: int, world_size: int, folder: Path, batch: MiniBatch) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        exact(patch)
        return outcome(learner(settings(KL, dtype="float64", lora=LORA), folder, rank, world_size), batch)


def test_ranks_leave_the_adapters_gradient_as_it_is(
    model_folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact(monkeypatch)
    rows = reference()
    alone = learner(settings(KL, dtype="float64", lora=LORA), model_folder)
    expected = outcome(alone, mini_batch([[rows]], TRAJECTORIES))
    for ours in ranks(2, of_rank, model_folder, batch_in(2, cut(rows))):
        assert_same(ours, expected, 1e-9)


def held_on_rank(rank: int, world_size: int, folder: Path) -> tuple[set[str], set[str], bool, dict[str, Any]]:
    """A step in bfloat16: the types of the base and of the masters, whether it was applied, and the adapter that the
    rank began with."""
    made = learner(settings(dtype="bfloat16", lora=LORA), folder, rank, world_size, moved=False)
    types = {str(p.dtype) for name, p in made.policy.model.named_parameters() if not name.endswith((A, B))}
    begun = {name: tensor.float().tolist() for name, tensor in (made.policy.weights() or {}).items()}
    report = made.step(batch_in(world_size, made_rows(4, seed=61), 4))
    masters = {str(master.dtype) for master in made.policy.master_weights.tensors.values()}
    return types, masters, report.applied, begun


def test_a_bfloat16_base_stays_so_beside_a_float32_adapter_on_any_number_of_ranks(
    model_folder: Path, ranks: Ranks
) -> None:
    alone = held_on_rank(0, 1, model_folder)
    assert alone[:3] == ({"torch.bfloat16"}, {"torch.float32"}, True)
    assert ranks(2, held_on_rank, model_folder) == [alone, (*alone[:3], {})]


def test_the_reference_of_an_adapter_is_its_base_without_a_copy(model_folder: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    ours = learner(settings(KL, lora=LORA), model_folder)
    base = learner(settings(), model_folder)
    micros = [ours.policy.to_device(batch.ranks[0][0])]
    reference = ours._frozen.logprobs("reference", micros, 0)[0]
    assert torch.equal(reference, base.policy.logprobs(micros)[0])  # type: ignore[arg-type]
    assert not torch.equal(reference, ours.policy.logprobs(micros)[0])  # type: ignore[arg-type]
    assert ours._frozen.copies == {}


def test_a_reference_that_is_renewed_is_a_copy_of_the_adapter(model_folder: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    config = settings(KL | {"reference": {"refresh_every": 2}}, lora=LORA)
    ours = learner(config, model_folder)
    kl = [ours.step(batch).metrics["policy/reference_kl"] for _ in range(3)]
    assert kl[0] == 0 and kl[1] > 0 and kl[2] == 0


def test_the_reference_of_a_run_that_starts_with_an_adapter_is_that_adapter(model_folder: Path, tmp_path: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    earlier = learner(settings(trainer={"lr": 0.05}, lora=LORA), model_folder)
    assert earlier.step(batch).applied
    earlier.export(tmp_path / "adapter")
    ours = learner(settings(KL, lora=LORA, adapter=tmp_path / "adapter"), model_folder)
    kl = [ours.step(batch).metrics["policy/reference_kl"] for _ in range(2)]
    assert kl[0] == 0 < kl[1]


def test_experts_get_no_adapter_and_a_target_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    with pytest.raises(UserError, match=r"has experts.*\[q_proj,k_proj,v_proj,o_proj\]"):
        learner(settings(dtype="float64", lora=LORA), folder)
