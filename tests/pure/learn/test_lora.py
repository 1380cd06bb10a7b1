"""A low-rank adapter: the same gradients as through merged weights, in every layout, on any number of ranks."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from service.config.adapter import ATTENTION, LINEAR, LoraConfig
from service.errors import UserError
from service.handoff.batches.pack import prefix_order
from service.learn import layouts
from service.learn.learner import Learner
from service.learn.model.adapter_folder import PREFIX
from service.learn.model.lora import A, B
from service.learn.settings import LearnSettings
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings, small_model
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_families import FAMILIES, saved
from tests.pure.learn.test_split import batch_in, cut

LORA = LoraConfig(rank=4, alpha=6.0)
IN_ATTENTION = LORA.model_copy(update={"targets": ATTENTION})
TRAJECTORIES = 6
KL: dict[str, Any] = {"kl_coef": 0.5, "kl_estimator": "k2", "entropy_coef": 0.01}


def configured(
    lora: LoraConfig | None = LORA,
    dtype: str = "float64",
    algorithm: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
) -> LearnSettings:
    return settings(algorithm, trainer, dtype=dtype, lora=lora)


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
    found = {name: p.grad for name, p in made.policy.model.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp("families"))


def lora_of(folder: Path) -> LoraConfig:
    return IN_ATTENTION if folder.name.endswith("moe") else LORA


@pytest.mark.parametrize("trainer", [{}, {"gradient_checkpointing": True}], ids=str)
def test_the_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    family: Path, tmp_path: Path, trainer: dict[str, Any]
) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    lora = lora_of(family)
    ours = learner(configured(lora, trainer=trainer), family)
    theirs = learner(configured(None), family)
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
    ours = learner(configured(lora_of(family), "float32"), family, moved=False)
    plain = learner(configured(None, "float32"), family)
    assert ours.accumulate(batch).totals()["loss"] == plain.accumulate(batch).totals()["loss"]
    ours.policy.master_weights.drop_gradients()
    before = {name: p.detach().clone() for name, p in ours.policy.model.named_parameters()}
    losses = [ours.step(batch).metrics["policy/policy_loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    changed = {name for name, p in ours.policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.endswith((A, B))}


def outcome(
    config: LearnSettings, folder: Path, batch: MiniBatch, rank: int = 0, world_size: int = 1
) -> tuple[float, Any]:
    made = learner(config, folder, rank, world_size)
    loss = made.accumulate(batch).totals()["loss"]
    return loss, {name: gradient.double().numpy() for name, gradient in gradients(made).items()}


def assert_same(ours: tuple[float, Any], expected: tuple[float, Any], tolerance: float) -> None:
    assert ours[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance / 10)
    assert ours[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert np.linalg.norm(ours[1][name] - gradient) <= tolerance * np.linalg.norm(gradient), name


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
def test_cutting_and_packing_leave_the_adapters_gradient_as_it_is(
    model_folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "prefix_order", partial(prefix_order, least=1, fraction=0))
    rows = made_rows(TRAJECTORIES, seed=20)
    expected = outcome(configured(algorithm=KL), model_folder, mini_batch([[rows]], TRAJECTORIES))
    for dtype, tolerance in (("float64", 1e-5), ("float32", 1e-4)):
        config = configured(dtype=dtype, algorithm=KL, trainer={"layout": layout})
        for batch in (batch_in(1, cut(rows)), mini_batch([[rows[::-1], []]], TRAJECTORIES)):
            assert_same(outcome(config, model_folder, batch), expected, tolerance)


def outcomes_of_rank(rank: int, world_size: int, folder: Path, batch: MiniBatch) -> list[tuple[float, Any]]:
    return [
        outcome(configured(dtype=dtype, algorithm=KL), folder, batch, rank, world_size)
        for dtype in ("float64", "float32")
    ]


def test_ranks_leave_the_adapters_gradient_as_it_is(model_folder: Path, ranks: Ranks) -> None:
    rows, world_size = made_rows(TRAJECTORIES, seed=20), 2
    expected = outcome(configured(algorithm=KL), model_folder, mini_batch([[rows]], TRAJECTORIES))
    for results in ranks(world_size, outcomes_of_rank, model_folder, batch_in(world_size, cut(rows))):
        for ours, tolerance in zip(results, (1e-5, 1e-4), strict=True):
            assert_same(ours, expected, tolerance)


def held_on_rank(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A step in bfloat16: what a rank holds, and the adapter that it begins with and ends with."""
    made = learner(configured(dtype="bfloat16"), folder, rank, world_size, moved=False)
    types = {str(p.dtype) for name, p in made.policy.model.named_parameters() if not name.endswith((A, B))}
    begun = made.policy.weights()
    rows = [row for row in made_rows(4, seed=61) if row.trajectory % world_size == rank]
    batch = mini_batch([[rows] if r == rank else [[]] for r in range(world_size)], trajectories=4)
    report = made.step(batch)
    masters = made.policy.master_weights.tensors
    return {
        "types of the base": types,
        "types of the masters": {str(master.dtype) for master in masters.values()},
        "applied": report.applied,
        "begun": {name: tensor.float().numpy() for name, tensor in (begun or {}).items()},
    }


def test_a_bfloat16_base_stays_so_beside_a_float32_adapter_on_any_number_of_ranks(
    model_folder: Path, ranks: Ranks
) -> None:
    alone = held_on_rank(0, 1, model_folder)
    for number, found in enumerate(ranks(2, held_on_rank, model_folder)):
        assert found["applied"] and alone["applied"]
        assert found["types of the base"] == alone["types of the base"] == {"torch.bfloat16"}
        assert found["types of the masters"] == alone["types of the masters"] == {"torch.float32"}
        if number == 0:
            assert found["begun"].keys() == alone["begun"].keys()
            assert all(np.array_equal(found["begun"][name], alone["begun"][name]) for name in alone["begun"])


def test_the_reference_of_an_adapter_is_its_base_without_a_copy(model_folder: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    ours = learner(configured(dtype="float32", algorithm=KL), model_folder)
    base = learner(configured(None, "float32"), model_folder)
    micros = [ours.policy.to_device(batch.ranks[0][0])]
    reference = ours._frozen.logprobs("reference", micros, 0)[0]
    assert torch.equal(reference, base.policy.logprobs(micros)[0])  # type: ignore[arg-type]
    assert not torch.equal(reference, ours.policy.logprobs(micros)[0])  # type: ignore[arg-type]
    assert ours._frozen.copies == {}


def test_a_reference_that_is_renewed_is_a_copy_of_the_adapter(model_folder: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=61)]], trajectories=4)
    config = configured(dtype="float32", algorithm=KL | {"reference": {"refresh_every": 2}})
    ours = learner(config, model_folder)
    kl = [ours.step(batch).metrics["policy/reference_kl"] for _ in range(3)]
    assert kl[0] == 0 and kl[1] > 0 and kl[2] == 0


def test_what_is_published_has_pefts_names_and_b_without_its_factor(model_folder: Path) -> None:
    made = learner(configured(dtype="bfloat16"), model_folder)
    published, masters = made.policy.weights(), made.policy.master_weights.tensors
    assert published is not None
    assert len(published) == 2 * len(LINEAR) * len(made.policy.model.layers)
    assert {name: tensor.dtype for name, tensor in published.items()} == {
        f"base_model.model.{name}": torch.bfloat16 for name in masters
    }
    name = "model.layers.0.mlp.down_proj"
    assert published[PREFIX + name + A].shape == (4, 48) and published[PREFIX + name + B].shape == (32, 4)
    assert torch.equal(published[PREFIX + name + B], masters[name + B].to(torch.bfloat16))


def test_experts_get_no_adapter_and_a_target_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    with pytest.raises(UserError, match=r"has experts.*\[q_proj,k_proj,v_proj,o_proj\]"):
        learner(configured(LORA), folder)


def batches() -> list[MiniBatch]:
    return [mini_batch([[made_rows(6, seed=50 + number)]], 6) for number in range(4)]


def steps(made: Learner, these: list[MiniBatch]) -> list[float]:
    return [made.step(batch).metrics["policy/policy_loss"] for batch in these]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_adapter_takes_the_same_steps_and_its_checkpoint_is_small(
    model_folder: Path, tmp_path: Path, dtype: str
) -> None:
    algorithm = KL | {"anchor": "proximal", "anchor_every": 3}
    config, whole = (configured(lora, dtype, algorithm) for lora in (LORA, None))
    first = learner(config, model_folder, moved=False)
    steps(first, batches()[:2])
    first.save(tmp_path / "step_2")
    expected = steps(first, batches()[2:])
    resumed = learner(config, model_folder, moved=False)
    resumed.load(tmp_path / "step_2")
    assert steps(resumed, batches()[2:]) == expected
    ends = [made.policy.master_weights.tensors for made in (first, resumed)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])

    part = tmp_path / "step_2" / "rank_0_of_1.safetensors"
    with safe_open(part, "pt") as opened:
        assert {name.rpartition("lora_")[1] for name in opened.keys()} == {"lora_"}  # noqa: SIM118
    numbers = sum(master.numel() for master in ends[0].values())
    copies = 4  # weights, two moments, the proximal anchor
    assert copies * 4 * numbers < part.stat().st_size < copies * 4 * numbers + 50_000
    trains_all = learner(whole, model_folder)
    with pytest.raises(UserError, match=r"holds an adapter, but the configuration trains all weights \(model\.lora\)"):
        trains_all.load(tmp_path / "step_2")


def test_a_checkpoint_of_all_weights_or_of_an_adapter_for_another_base_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    ours = learner(configured(dtype="float32"), model_folder)
    ours.save(tmp_path / "step_0")
    other = small_model(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match=rf"is of an adapter for another model than {other}; use") as caught:
        learner(configured(dtype="float32"), other).load(tmp_path / "step_0")
    assert "\n" not in str(caught.value)
    moved = tmp_path / "moved"
    shutil.copytree(model_folder, moved)
    learner(configured(dtype="float32"), moved).load(tmp_path / "step_0")
    learner(configured(None, "float32"), model_folder).save(tmp_path / "whole")
    with pytest.raises(UserError, match=r"holds all weights, but the configuration trains an adapter \(model\.lora\)"):
        ours.load(tmp_path / "whole")
