"""From steps to a gradient: neither how steps are merged, nor packing, nor ranks change what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.handoff.batches.batch import BatchSettings, batch_of_rank, form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.tables import ends_table, steps_table
from service.types import MiniBatch, PolicyVersion, Step, TrajectoryEnd, TrajectoryId
from tests.pure.learn.builders import VOCABULARY
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_split import Outcome, assert_same, configured, outcome

SAMPLES, PROMPTS = 4, 2
WAYS = [
    "token_mean",
    "trajectory_mean",
    "prompt_mean",
    "seq_mean_token_sum_norm",
    "kl k3",
    "gspo",
    "sequence TIS",
    "masks",
]
TIED_WAYS = ["token_mean", "trajectory_mean", "kl k3", "gspo", "sequence TIS"]


def steps_of(trajectory: TrajectoryId, uid: str, rng: np.random.Generator) -> list[Step]:
    """Turns that mostly continue the one before; some drift by a token, some go aside and the next one comes back."""
    history = rng.integers(0, VOCABULARY, rng.integers(2, 6)).tolist()
    start, steps, aside = list(history), [], None
    for index in range(int(rng.integers(1, 6))):
        response = rng.integers(0, VOCABULARY, rng.integers(1, 5)).astype(np.int32)
        mask = np.ones(len(response), bool)
        mask[-1] = bool(rng.random() < 0.7)  # the last token may be an appended end
        steps.append(
            Step(
                trajectory=trajectory,
                prompt_uid=uid,
                index=index,
                prompt_ids=np.array(history, np.int32),
                response_ids=response,
                logprobs=np.where(mask, rng.normal(-3.6, 0.3, len(response)), 0).astype(np.float32),
                loss_mask=mask,
                versions=np.where(mask, PolicyVersion(0, 0).pack(), -1).astype(np.int64),
                temperature=1.0,
            )
        )
        kind = rng.random()
        if aside is not None:
            history, aside = aside, None
        elif kind < 0.3:
            aside = history + response.tolist() + [int(rng.integers(VOCABULARY))]
            history = start + rng.integers(0, VOCABULARY, 2).tolist()
        elif kind < 0.4 and len(history) > 2:
            history = [*history[:-1], (history[-1] + 1) % VOCABULARY, *response.tolist()]
        else:
            history = history + response.tolist() + rng.integers(0, VOCABULARY, rng.integers(0, 4)).tolist()
    return steps


def groups() -> list[CompleteGroup]:
    rng = np.random.default_rng(70)
    made = []
    for group_id in range(PROMPTS):
        steps, ends = [], []
        for sample in range(SAMPLES):
            trajectory = TrajectoryId(group_id, sample)
            own = steps_of(trajectory, str(group_id), rng)
            steps += own
            ends.append(TrajectoryEnd(trajectory, str(group_id), len(own), "stop", float(rng.random())))
        shuffled = [steps[i] for i in rng.permutation(len(steps))]
        made.append(CompleteGroup(group_id, str(group_id), steps_table(shared_form(shuffled)), ends_table(ends)))
    return made


def formed(**settings: Any) -> MiniBatch:
    history = VersionHistory()
    return form_mini_batch(0, groups(), history, BatchSettings(**{"ranks": 1, "token_budget": 10_000} | settings))


def outcomes_of_rank(
    rank: int, world_size: int, folder: Path, batches: dict[str, MiniBatch]
) -> dict[tuple[str, str], Outcome]:
    return {
        (way, name): outcome(configured(way, "float64"), folder, batch_of_rank(batch, rank), rank, world_size)
        for way in TIED_WAYS
        for name, batch in batches.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_merging_and_packing_leave_loss_and_gradient_as_they_are(model_folder: Path, way: str) -> None:
    expected = outcome(configured(way, "float64"), model_folder, formed(mode="off"))
    rows = {mode: formed(mode=mode).rows_G.sum() for mode in ("off", "linear", "tree")}
    assert rows["off"] > rows["linear"] > rows["tree"], "the episodes must give each mode something to merge"
    for settings in ({"mode": "linear"}, {"mode": "tree"}, {"mode": "linear", "token_budget": 64}):
        for dtype in ("float32", "float64"):
            ours = outcome(configured(way, dtype), model_folder, formed(**settings))
            assert_same(ours, expected, dtype)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_loss_and_gradient_of_merged_steps_as_they_are(
    model_folder: Path, ranks: Ranks, world_size: int
) -> None:
    batches = {mode: formed(mode=mode, ranks=world_size, token_budget=80) for mode in ("off", "linear", "tree")}
    by_rank = ranks(world_size, outcomes_of_rank, model_folder, batches)
    for way in TIED_WAYS:
        expected = outcome(configured(way, "float64"), model_folder, formed(mode="off"))
        for results in by_rank:
            for mode in batches:
                assert_same(results[way, mode], expected, "float64")
