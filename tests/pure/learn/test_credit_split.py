"""With credit by turn, the same gradient however trajectories are cut into rows, merged, packed and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from service.config.tree import ModelConfig
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.credit import Credit
from service.handoff.batches.pack import prefix_order
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import Mode
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.tables import ends_table, steps_table
from service.learn import layouts
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.types import MiniBatch, Step, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import end
from tests.pure.learn.builders import CPU, VOCABULARY, settings

ALGORITHM = {"estimator": "rloo", "returns": "sum", "reduction": "seq_mean_token_sum_norm", "norm_tokens": 40}


def played(rng: np.random.Generator, trajectory: TrajectoryId, turns: int) -> list[Step]:
    """Turns that continue one another, and one that begins a new conversation, as after a compaction."""
    history, steps = rng.integers(0, VOCABULARY, 3).tolist(), list[Step]()
    for index in range(turns):
        if index == 2:
            history = rng.integers(0, VOCABULARY, 2).tolist()
        response = rng.integers(0, VOCABULARY, rng.integers(1, 4)).tolist()
        steps.append(
            Step(
                trajectory,
                "p",
                index,
                np.array(history, np.int32),
                np.array(response, np.int32),
                rng.normal(-3.6, 0.3, len(response)).astype(np.float32),
                np.ones(len(response), np.bool_),
                np.zeros(len(response), np.int64),
                reward=float(rng.normal()),
            )
        )
        history = history + response + rng.integers(0, VOCABULARY, 1).tolist()
    return steps


def group_of(rng: np.random.Generator) -> tuple[list[Step], list[TrajectoryEnd]]:
    steps, ends = list[Step](), list[TrajectoryEnd]()
    for sample, turns in enumerate((4, 2, 3)):
        steps += played(rng, TrajectoryId(0, sample), turns)
        ends.append(end(TrajectoryId(0, sample), turns, uid="p"))
    return steps, ends


def cut_at_random(rng: np.random.Generator, steps: list[Step]) -> list[Step]:
    """The steps in another order, with temperatures that keep neighbours from being merged; see `batch_of`."""
    return [replace(steps[i], temperature=float(rng.integers(1, 3))) for i in rng.permutation(len(steps))]


def batch_of(steps: list[Step], ends: list[TrajectoryEnd], credit: Credit, mode: Mode, budget: int) -> MiniBatch:
    """The mini-batch of one group, in which every row has the temperature 1 after all."""
    group = CompleteGroup(0, "p", steps_table(shared_form(steps)), ends_table(ends))
    batch = form_mini_batch(0, [group], VersionHistory(), BatchSettings(1, budget, "rloo", "sum", credit, 0.9, mode))
    ranks = tuple(
        tuple(replace(micro, temperature_R=np.ones_like(micro.temperature_R)) for micro in rank) for rank in batch.ranks
    )
    return replace(batch, ranks=ranks)


def gradient(learner: Learner, batch: MiniBatch) -> np.ndarray:
    learner.accumulate(batch)
    parts = [parameter.grad.flatten() for parameter in learner.policy.model.parameters() if parameter.grad is not None]
    learner.policy.master_weights.drop_gradients()
    return torch.cat(parts).double().numpy()


def in_float64(config: LearnSettings, model_folder: Path) -> Learner:
    """A learner all of whose numbers are float64."""
    config = replace(config, model=ModelConfig.model_construct(dtype="float64"))
    learner = Learner(config, model_folder, CPU, 0, 1)
    for module in learner.policy.model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # the model's own computes in float32
            shape, eps = module.weight.shape, module.variance_epsilon
            module.forward = partial(F.rms_norm, normalized_shape=shape, weight=module.weight, eps=eps)
    return learner


@pytest.fixture(scope="module", params=["packed", "padded", "shared_prefix"])
def learner(model_folder: Path, request: pytest.FixtureRequest) -> Iterator[Learner]:
    config = settings(ALGORITHM | {"clip_low": 0.9, "clip_high": 10.0}, {"layout": request.param})
    learner = in_float64(config, model_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "prefix_order", partial(prefix_order, least=1))  # rows share tokens from the first on
        yield learner


@pytest.mark.parametrize("cuttings", [8, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("credit", ["trajectory", "return_to_go"])
def test_any_cutting_into_rows_and_micro_batches_leaves_the_gradient_as_it_is(
    learner: Learner, credit: Credit, cuttings: int
) -> None:
    rng = np.random.default_rng(6)
    steps, ends = group_of(rng)
    expected = gradient(learner, batch_of(steps, ends, credit, "off", 1000))
    n_rows = set[int]()
    modes: list[Mode] = ["off", "linear", "tree"]
    for number in range(cuttings):
        batch = batch_of(cut_at_random(rng, steps), ends, credit, modes[number % 3], int(rng.integers(20, 80)))
        n_rows.add(int(batch.rows_G.sum()))
        difference = np.linalg.norm(gradient(learner, batch) - expected)
        assert difference <= 1e-9 * np.linalg.norm(expected)
    assert len(n_rows) > 3


def test_credits_differ_in_their_gradient(learner: Learner) -> None:
    steps, ends = group_of(np.random.default_rng(4))
    credits: list[Credit] = ["trajectory", "return_to_go"]
    one, other = (gradient(learner, batch_of(steps, ends, credit, "tree", 1000)) for credit in credits)
    assert np.linalg.norm(one - other) > 1e-2 * np.linalg.norm(one)


def test_a_micro_batch_that_does_not_say_whose_turn_its_tokens_are_is_refused(learner: Learner) -> None:
    steps, ends = group_of(np.random.default_rng(4))
    batch = batch_of(steps, ends, "return_to_go", "tree", 1000)
    [[micro]] = batch.ranks
    with pytest.raises(ValueError, match="loss tokens of no turn"):
        learner.accumulate(replace(batch, ranks=((replace(micro, turn_N=None),),)))
