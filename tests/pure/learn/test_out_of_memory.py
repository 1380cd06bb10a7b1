"""What a step that runs out of the device's memory says, and with what the ranks go on."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from service.learn.learner import Learner
from service.learn.model.policy import OutOfMemory, Policy
from service.learn.model.policy_model import Checkpointing
from service.learn.supervised import SupervisedSteps
from service.types import SupervisedRow
from tests.pure.learn.builders import CPU, SHAPE, made_rows, mini_batch, settings

LAYERS = SHAPE["num_hidden_layers"]
CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB."


def without_memory(folder: Path, checkpointing: Checkpointing | None) -> Policy:
    """A policy whose forward pass finds no memory."""
    policy = Policy(settings(), folder, CPU, 0, 1, checkpointing=checkpointing)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError(CUDA_SAYS + "\nSee documentation for Memory Management")

    policy.model.layers[-1].register_forward_pre_hook(fail)
    return policy


@pytest.mark.parametrize(
    ("now", "lighter", "told"),
    [
        (None, Checkpointing(1), "0 of 2 layers kept their input only (1 would take less)"),
        (Checkpointing(1), Checkpointing(2), "1 of 2 layers kept their input only (2 would take less)"),
        (Checkpointing(2), None, "2 of 2 layers kept their input only"),
    ],
)
def test_a_step_without_memory_is_one_line_with_what_takes_less_and_leaves_no_gradient(
    now: Checkpointing | None, lighter: Checkpointing | None, told: str, model_folder: Path
) -> None:
    policy = without_memory(model_folder, now)
    learner = Learner(settings(), model_folder, CPU, 0, 1, policy)
    supervised = SupervisedSteps(settings(), policy)
    demonstration = SupervisedRow(made_rows(1, seed=0)[0].token_ids, made_rows(1, seed=0)[0].loss_mask)
    batch = mini_batch([[made_rows(4, seed=0)]], trajectories=4)
    for step in (lambda: learner.step(batch), lambda: supervised.step([demonstration], 1e-3)):
        with pytest.raises(OutOfMemory) as caught:
            step()
        passed_on = pickle.loads(pickle.dumps(caught.value))
        assert str(passed_on) == f"rank 0 was out of memory, {told}: {CUDA_SAYS}"
        assert passed_on.lighter == lighter
        assert not policy.master_weights.gradients()


def test_an_error_that_is_no_lack_of_memory_stays_as_it_is(model_folder: Path) -> None:
    policy = Policy(settings(), model_folder, CPU, 0, 1)
    learner = Learner(settings(), model_folder, CPU, 0, 1, policy)

    def fail(*_: object) -> None:
        raise RuntimeError("a kernel failed")

    policy.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^a kernel failed$"):
        learner.step(mini_batch([[made_rows(4, seed=0)]], trajectories=4))
