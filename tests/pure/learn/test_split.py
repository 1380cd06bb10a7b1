"""The same metrics and gradient however trajectories are cut into rows, merged, packed or sharded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.credit import Rule
from service.handoff.ledger.scores import CompleteGroup, sampled_tokens
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import Mode
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.tables import ends_table, steps_table
from service.learn.learner import Learner
from service.types import MiniBatch, Step, TrajectoryEnd, TrajectoryId
from tests.pure.learn.builders import CPU, mini_batch, settings
from tests.pure.learn.outcomes import (
    MERGED_WAYS,
    PACKED,
    SHARED,
    TRAJECTORIES,
    WAYS,
    assert_same,
    batch_in,
    configured,
    cut,
    exact,
    moved,
    outcome,
    played,
    reference,
)

FORMS = ((PACKED, "float64", 1e-9), ("padded", "float64", 1e-9), (SHARED, "float64", 1e-9), (PACKED, "float32", 1e-4))
MODES: list[Mode] = ["off", "linear", "tree"]
SAMPLES = 4


@pytest.fixture(autouse=True, scope="module")
def exactly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        exact(patch)
        yield


@pytest.mark.parametrize("way", WAYS)
def test_cutting_packing_and_layouts_leave_metrics_and_gradient_as_they_are(model_folder: Path, way: str) -> None:
    rows = reference()
    whole = mini_batch([[rows]], TRAJECTORIES)
    expected = outcome(moved(configured(way), model_folder, whole), whole)
    batches = [
        mini_batch([[[row] for row in rows]], TRAJECTORIES),
        mini_batch([[cut(rows)]], TRAJECTORIES),
        mini_batch([[rows[:2], cut(rows[2:])]], TRAJECTORIES),
        batch_in(1, rows[::-1]),
    ]
    for layout, dtype, tolerance in FORMS:
        learner = moved(configured(way, layout, dtype), model_folder, whole)
        for batch in batches:
            assert_same(outcome(learner, batch), expected, tolerance)


@pytest.mark.parametrize("way", ["gspo", "sequence TIS", "masks", "kl k2"])
def test_the_settings_under_test_change_the_gradient(model_folder: Path, way: str) -> None:
    """Otherwise the tests above and below would prove nothing about them."""
    batch = mini_batch([[reference()]], TRAJECTORIES)
    ours, plain = (outcome(moved(configured(w), model_folder, batch), batch).gradient for w in (way, "trajectory_mean"))
    assert np.linalg.norm(ours - plain) > 1e-2 * np.linalg.norm(plain)


# -- from steps on: how they are merged, and credit and teachers by turn and token -------------------------------------


def group_of(rng: np.random.Generator, group_id: int = 0) -> tuple[list[Step], list[TrajectoryEnd]]:
    steps, ends = list[Step](), list[TrajectoryEnd]()
    for sample in range(SAMPLES):
        own = played(rng, TrajectoryId(group_id, sample), int(rng.integers(1, 6)))
        steps += own
        ends.append(TrajectoryEnd(own[0].trajectory, str(group_id), len(own), "stop", float(rng.random())))
    return steps, ends


def cut_at_random(rng: np.random.Generator, steps: list[Step]) -> list[Step]:
    """The steps in another order, with temperatures that keep neighbours from being merged; see `formed`."""
    return [replace(steps[i], temperature=float(rng.integers(1, 3))) for i in rng.permutation(len(steps))]


def formed(steps: list[Step], ends: list[TrajectoryEnd], shift: float | None = None, **named: Any) -> MiniBatch:
    """The mini-batch of one group, in which every row has the temperature 1 after all. `shift`: of the
    log-probabilities of a teacher, which the second trajectory does not have; None: no trajectory has one."""
    table = steps_table(shared_form(steps))
    if shift is not None:
        teacher_N = np.full(len(table.token_ids_N), np.nan, np.float32)
        sampled = sampled_tokens(table)
        teacher_N[sampled] = -3 - np.cos(np.arange(len(sampled))) + shift
        item_N = np.searchsorted(table.offsets_K, np.arange(len(teacher_N)), "right") - 1
        teacher_N[table.sample_K[item_N] == 1] = np.nan
        table = replace(table, teacher_logprobs_N=teacher_N)
    group = CompleteGroup(0, "0", table, ends_table(ends))
    settings = BatchSettings(**{"ranks": 1, "token_budget": 1000, "rule": Rule("rloo", "sum")} | named)
    batch = form_mini_batch(0, [group], VersionHistory(), settings)
    ranks = tuple(
        tuple(replace(micro, temperature_R=np.ones_like(micro.temperature_R)) for micro in rank) for rank in batch.ranks
    )
    return replace(batch, ranks=ranks)


def test_merging_leaves_metrics_and_gradient_as_they_are(model_folder: Path) -> None:
    steps, ends = group_of(np.random.default_rng(70))
    alone = {mode: formed(steps, ends, mode=mode) for mode in MODES}
    n_rows = [batch.rows_G.sum() for batch in alone.values()]
    assert n_rows == sorted(n_rows, reverse=True) and len(set(n_rows)) == 3, "each mode must have something to merge"
    for way in MERGED_WAYS:
        learner = moved(configured(way), model_folder, alone["off"])
        expected = outcome(learner, alone["off"])
        for batch in (alone["linear"], alone["tree"], formed(steps, ends, mode="linear", token_budget=64)):
            assert_same(outcome(learner, batch), expected, 1e-9)


ALGORITHM = {"estimator": "rloo", "returns": "sum", "reduction": "seq_mean_token_sum_norm", "norm_tokens": 40}
ALGORITHM |= {"clip_low": 0.9, "clip_high": 10.0}
SIGNALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "trajectory": ({}, {}),
    "return_to_go": ({}, {"rule": Rule("rloo", "sum", "return_to_go", 0.9)}),
    "teacher, advantage": ({"teacher": {"coef": 0.5, "mode": "advantage"}}, {"shift": 0.0}),
    "teacher, kl": ({"teacher": {"coef": 0.5, "mode": "kl"}}, {"shift": 0.0}),
}
"""The algorithm's settings, and those of the mini-batch."""


@pytest.mark.parametrize("cuttings", [6, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", [PACKED, "padded", SHARED])
@pytest.mark.parametrize("signal", SIGNALS)
def test_any_cutting_into_rows_leaves_the_gradient_of_turns_and_teachers_as_it_is(
    model_folder: Path, signal: str, layout: str, cuttings: int
) -> None:
    algorithm, named = SIGNALS[signal]
    learner = Learner(settings(ALGORITHM | algorithm, {"layout": layout}, dtype="float64"), model_folder, CPU, 0, 1)
    rng = np.random.default_rng(6)
    steps, ends = group_of(rng)
    expected = outcome(learner, formed(steps, ends, mode="off", **named))
    n_rows = set[int]()
    for number in range(cuttings):
        budget = int(rng.integers(40, 90))
        batch = formed(cut_at_random(rng, steps), ends, mode=MODES[number % 3], token_budget=budget, **named)
        n_rows.add(int(batch.rows_G.sum()))
        assert_same(outcome(learner, batch), expected, 1e-9)
    assert len(n_rows) > 1
    changed = SIGNALS["return_to_go"][1] if signal == "trajectory" else {"shift": 0.5}
    other = formed(steps, ends, mode="off", **changed)
    difference = outcome(learner, other).gradient - expected.gradient
    assert np.linalg.norm(difference) > 1e-2 * np.linalg.norm(expected.gradient), "the signal is in the gradient"


def test_a_micro_batch_that_does_not_say_whose_turn_its_tokens_are_is_refused(model_folder: Path) -> None:
    learner = Learner(settings(ALGORITHM), model_folder, CPU, 0, 1)
    batch = formed(*group_of(np.random.default_rng(4)), **SIGNALS["return_to_go"][1])
    [[micro]] = batch.ranks
    with pytest.raises(ValueError, match="loss tokens of no turn"):
        learner.accumulate(replace(batch, ranks=((replace(micro, turn_N=None),),)))
