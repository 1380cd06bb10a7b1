"""The trial of the largest micro-batches: what it computes, what it compiles, what it leaves behind."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from service.config.learn import TrainerConfig
from service.handoff.batches.pack import prefix_order
from service.learn import trial
from service.learn.compile import stop_compiling
from service.learn.learner import Learner
from service.learn.model.policy import OutOfMemory, Policy
from service.learn.model.policy_model import Checkpointing
from service.learn.supervised import SupervisedSteps
from service.learn.trial import engine_bytes, keep_gathered_weights, largest_mini_batch, take_trial
from service.types import MicroBatch, SupervisedRow
from tests.pure.learn.builders import CPU, VOCABULARY, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.varlen import as_on_gpu, eager_graphs

BUDGET = 64


def computed(micro: MicroBatch) -> int:
    """Tokens that count in the budget: shared ones once."""
    return len(micro.token_ids_N) - int(prefix_order(micro.token_ids_N, micro.offsets_R).shared_R.sum())


@pytest.mark.parametrize(
    ("layout", "longest", "shared"),
    [
        ("auto", 16, [False, False]),  # too short to share a prefix
        ("auto", 24, [False, True, False]),
        ("auto", 1 << 20, [False, True, False]),
        ("shared_prefix", 32, [False, True, False]),
        ("packed", 32, [False, False]),
    ],
)
def test_the_micro_batches_fill_the_budget_in_each_layout(layout: Any, longest: int, shared: list[bool]) -> None:
    trainer = TrainerConfig(max_tokens_per_micro_batch=BUDGET, layout=layout)
    batch = largest_mini_batch(trainer, vocab_size=1000, longest_row=longest)
    (micros,) = batch.ranks
    for micro, shares in zip(micros, shared, strict=True):
        assert BUDGET * 0.75 <= computed(micro) <= BUDGET
        assert (computed(micro) < len(micro.token_ids_N)) is shares
        assert np.diff(micro.offsets_R).max() <= longest
    assert batch.loss_tokens_G.sum() == sum(micro.loss_mask_N.sum() for micro in micros) > BUDGET


def test_a_row_longer_than_the_budget_and_a_budget_of_two_tokens_are_tried_too(model_folder: Path) -> None:
    for tokens in (2, 3, 7):
        learn = settings(trainer={"max_tokens_per_micro_batch": tokens})
        take_trial(learn, Policy(learn, model_folder, CPU, 0, 1))


@pytest.mark.parametrize(
    "algorithm", [{}, {"kl_coef": 0.1}, {"anchor": "proximal", "anchor_every": 2}, {"loss": "gspo"}], ids=str
)
def test_nothing_of_the_trial_is_left(model_folder: Path, algorithm: dict[str, Any]) -> None:
    learn = settings(algorithm, {"max_tokens_per_micro_batch": BUDGET})
    batch = mini_batch([[made_rows(4, seed=0)]], trajectories=4)
    tried, plain = (Policy(learn, model_folder, CPU, 0, 1) for _ in range(2))
    take_trial(learn, tried)
    reports = [Learner(learn, model_folder, CPU, 0, 1, policy).step(batch) for policy in (tried, plain)]
    assert reports[0] == reports[1]
    for name, tensor in plain.master_weights.tensors.items():
        assert torch.equal(tried.master_weights.tensors[name], tensor)


CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."
WITHOUT_MEMORY = torch.OutOfMemoryError(CUDA_SAYS + "\nSee documentation for Memory Management")


@pytest.mark.parametrize(
    ("now", "lighter", "told"),
    [
        (None, Checkpointing(1), "0 of 2 layers kept their input only (1 would take less)"),
        (Checkpointing(1), Checkpointing(2), "1 of 2 layers kept their input only (2 would take less)"),
        (Checkpointing(2), None, "2 of 2 layers kept their input only"),
    ],
)
def test_steps_and_trials_without_memory_are_one_line_with_what_takes_less_and_leave_no_gradient(
    now: Checkpointing | None, lighter: Checkpointing | None, told: str, model_folder: Path
) -> None:
    learn = settings(trainer={"max_tokens_per_micro_batch": BUDGET})
    policy = Policy(learn, model_folder, CPU, 0, 1, checkpointing=now)
    learner, supervised = Learner(learn, model_folder, CPU, 0, 1, policy), SupervisedSteps(learn, policy)
    rows, held = made_rows(4, seed=0), list[bool]()
    long_rows = [SupervisedRow(row.token_ids.repeat(3), row.loss_mask.repeat(3)) for row in rows]

    def fail_at_the_third(*_: object) -> None:
        held.append(bool(policy.master_weights.gradients()))
        if len(held) == 3:
            raise WITHOUT_MEMORY

    policy.model.register_forward_pre_hook(fail_at_the_third)
    for step in (
        lambda: take_trial(learn, policy),
        lambda: learner.step(mini_batch([[[row] for row in rows]], trajectories=4)),
        lambda: supervised.step(long_rows, 1e-3),
    ):
        held.clear()
        with pytest.raises(OutOfMemory) as caught:
            step()
        passed_on = pickle.loads(pickle.dumps(caught.value))
        assert str(passed_on) == f"rank 0 was out of memory, {told}: {CUDA_SAYS}"
        assert passed_on.lighter == lighter
        assert held == [False, True, True], "the gradients of a micro-batch are in memory during the next"
        assert not policy.master_weights.gradients()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_every_compiled_graph_is_made_in_the_trial_and_none_later(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Of packed rows, of rows that share a prefix, of an empty micro-batch, and of a forward pass alone."""
    eager_graphs(monkeypatch)
    as_on_gpu(monkeypatch)
    learn = settings(trainer={"max_tokens_per_micro_batch": BUDGET, "compile": True})
    policy = Policy(learn, model_folder, CPU, 0, 1)
    take_trial(learn, policy)
    made = counters["stats"]["unique_graphs"]
    assert made > 1
    stop_compiling()
    request.addfinalizer(partial(torch.compiler.set_stance, "default"))
    learner = Learner(learn, model_folder, CPU, 0, 1, policy)
    packed, longer = made_rows(3, seed=0), made_rows(2, seed=1, lengths=(40, 50))
    shared = list(largest_mini_batch(learn.trainer, VOCABULARY, 20).ranks[0][1:2])
    learner.step(mini_batch([[packed, [], longer, packed[:1]]], trajectories=3))
    learner.step(largest_mini_batch(learn.trainer, VOCABULARY, 20))
    policy.logprobs([policy.to_device(micro) for micro in shared])
    monkeypatch.undo()  # what now needs other graphs is computed without
    report = learner.step(mini_batch([[packed]], trajectories=3))
    assert report.applied and counters["stats"]["unique_graphs"] == made


def gathered_again(policy: Policy) -> list[bool]:
    """Of each sharded layer: whether its weights are freed after the forward pass."""
    layers: list[Any] = list(policy.model.layers)
    return [layer._get_fsdp_state()._fsdp_param_group._reshard_after_forward for layer in layers]


def kept_where_ample(rank: int, world_size: int, folder: Path, free: list[float]) -> tuple[bool, list[bool], float]:
    learn = settings(trainer={"ranks": world_size, "max_tokens_per_micro_batch": BUDGET})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.learn.model.sharding.SMALL_LAYER", 0)
        patch.setattr(trial, "free_bytes", lambda device, margin: free[rank])
        policy = Policy(learn, folder, CPU, rank, world_size)
        take_trial(learn, policy)
        keep_gathered_weights(policy)
    batch = mini_batch([[made_rows(4, seed=0)]], trajectories=4)
    norm = Learner(learn, folder, CPU, rank, world_size, policy).step(batch).metrics["policy/grad_norm"]
    dist.barrier()
    return policy.checkpointing.regather, gathered_again(policy), norm


@pytest.mark.parametrize(("free", "again"), [([1e12, 1e12], False), ([1e12, 0.0], True)])
def test_gathered_weights_are_kept_where_every_rank_has_ample_memory(
    model_folder: Path, ranks: Ranks, free: list[float], again: bool
) -> None:
    found = ranks(2, kept_where_ample, model_folder, free)
    assert [result[:2] for result in found] == [(again, [again] * 2)] * 2
    assert found[0][2] == found[1][2]


def test_an_engine_on_the_same_gpu_needs_its_weights_twice_and_its_kv_cache(model_folder: Path) -> None:
    policy = Policy(settings(dtype="bfloat16"), model_folder, CPU, 0, 1)
    weights = 2 * sum(parameter.numel() for parameter in policy.model.parameters())
    assert engine_bytes(policy, 10) == 2 * weights + 10 + trial.ENGINE_BYTES
