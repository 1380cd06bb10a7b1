import math
from dataclasses import replace

import numpy as np
import pytest

from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.batch_metrics import info_means
from service.handoff.batches.credit import Rule
from service.handoff.batches.filters import FilterSettings, filtered
from service.handoff.batches.pack import Layout, in_bins, place
from service.handoff.ledger.events import Ended, GroupState, GroupStats
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.info import MAX_INFO_BYTES, MAX_INFO_NAMES, packed_info
from service.handoff.steps.tables import ends_table
from service.handoff.steps.values import OVER_LONG
from service.types import PolicyVersion, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import complete_group, end, episode, shared, step
from tests.step_keys import without_meaning

SETTINGS = BatchSettings(ranks=2, token_budget=256, max_staleness=2)


def history_up_to(version: int) -> VersionHistory:
    history = VersionHistory()
    for number in range(1, version + 1):
        history.publish(PolicyVersion(0, number))
    return history


def group(rng: np.random.Generator, group_id: int, samples: int = 4) -> CompleteGroup:
    steps, ends = [], []
    for sample in range(samples):
        trajectory, turns = TrajectoryId(group_id, sample), int(rng.integers(1, 5))
        reward = float(rng.integers(0, 2))
        steps += shared(episode(rng, turns, trajectory, f"p{group_id}", reward))
        ends.append(end(trajectory, turns, reward, f"p{group_id}"))
    return complete_group(steps, ends, rng)


def test_a_mini_batch_holds_every_trajectory_once_and_whole() -> None:
    rng = np.random.default_rng(0)
    groups = [group(rng, group_id) for group_id in (7, 3, 9)]
    batch = form_mini_batch(1, groups, history_up_to(4), SETTINGS)
    assert batch.groups == (7, 3, 9)
    assert batch.prompt_of_trajectory_G.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    ranks_of = [{int(t) for m in rank for t in m.trajectory_of_row_R if t >= 0} for rank in batch.ranks]
    assert not ranks_of[0] & ranks_of[1] and ranks_of[0] | ranks_of[1] == set(range(12))
    assert len({len(rank) for rank in batch.ranks}) == 1
    loss = sum(int(m.loss_mask_N.sum()) for rank in batch.ranks for m in rank)
    assert loss == batch.loss_tokens_G.sum() == batch.metrics["tokens/loss"]
    assert without_meaning(batch.metrics) == []


def test_tokens_beyond_the_staleness_bound_carry_no_loss_and_are_counted() -> None:
    steps = shared([step(0, [1], [2, 3], version=0), step(1, [1, 2, 3, 4], [5], version=3)])
    batch = form_mini_batch(1, [complete_group(steps, [end(steps=2)])], history_up_to(4), SETTINGS)
    [micro_batch] = [m for rank in batch.ranks for m in rank if m.trajectory_of_row_R[0] == 0]
    assert micro_batch.loss_mask_N.tolist() == [False, False, False, False, True]
    assert micro_batch.staleness_N.tolist() == [-1, 4, 4, -1, 1]
    assert micro_batch.logprobs_N.tolist() == [0, 0, 0, 0, -1.125]
    assert (batch.metrics["tokens/stale"], batch.metrics["tokens/loss"]) == (2, 1)
    assert batch.metrics["async/staleness_max"] == 4


def test_a_trajectory_without_steps_still_has_its_return() -> None:
    ends = [end(reward=1), end(TrajectoryId(0, 1), steps=0, reward=0)]
    batch = form_mini_batch(1, [group_of(*ends)], VersionHistory(), SETTINGS)
    assert batch.rows_G.tolist() == [1, 0] and batch.return_G.tolist() == [1, 0]
    assert batch.advantage_G[0] == pytest.approx(-batch.advantage_G[1])


def test_what_environments_say_is_averaged_over_the_trajectories_of_the_mini_batch() -> None:
    said = [
        {"won": 1.0, "odd": math.nan},
        {"won": 0.0, "tries": 3.0, "error": 2.0},
        {"error": math.inf},
        {"won": 1 / 3},
    ]
    ends = [
        end(TrajectoryId(0, sample), steps=0)._replace(info=packed_info("games:Wordle", info))
        for sample, info in enumerate(said)
    ]
    ends += [
        end(TrajectoryId(0, 4), steps=0)._replace(info=packed_info("sql", {"won": 7.0})),
        end(TrajectoryId(0, 5), 0),
    ]
    metrics = form_mini_batch(1, [complete_group([], ends)], VersionHistory(), SETTINGS).metrics
    assert {name: mean for name, mean in metrics.items() if name.startswith("environment/")} == {
        "environment/games:Wordle/won": pytest.approx(1 / 3, abs=1e-6),
        "environment/games:Wordle/tries": 0.75,
        "environment/games:Wordle/error": pytest.approx(2 / 3),
        "environment/sql/won": 7.0,
    }


def test_an_info_has_bounded_bytes_and_numbers() -> None:
    info = packed_info("e", {f"{number}": number / 3 for number in range(1000)})
    assert len(info) <= MAX_INFO_BYTES and info.count(":") == MAX_INFO_NAMES + 1
    assert 900 < len(packed_info("e", {"é" * number: 1.0 for number in range(99)}).encode()) <= MAX_INFO_BYTES
    many = [
        end(TrajectoryId(0, sample), 0)._replace(info=packed_info("e", {f"{sample}": 1.0})) for sample in range(100)
    ]
    assert len(info_means(ends_table(many))) == MAX_INFO_NAMES


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
def test_a_mini_batch_in_which_no_trajectory_has_a_step_is_of_dummies(layout: Layout) -> None:
    none = [complete_group([], [end(steps=0), end(TrajectoryId(0, 1), steps=0)])]
    batch = form_mini_batch(1, none, VersionHistory(), replace(SETTINGS, layout=layout))
    assert [[m.trajectory_of_row_R.tolist() for m in rank] for rank in batch.ranks] == [[[-1]], [[-1]]]


def group_of(*ends: TrajectoryEnd) -> CompleteGroup:
    return complete_group([step(0, [1], [2])], ends)


def test_zero_variance_looks_at_returns() -> None:
    same = [end(TrajectoryId(0, s), reward=1.0 - s * 2.0**-24) for s in range(3)]  # but for rounding
    settings = FilterSettings(Rule("grpo"), zero_variance=True)
    assert filtered(group_of(*same), settings) == Ended(
        0, GroupState.FILTERED, "zero_variance", GroupStats(1, 3, 3 - 3 * 2.0**-24, 1, flat=1, ones=1, tokens=1)
    )
    assert filtered(group_of(*same, end(TrajectoryId(0, 3), reward=0.0)), settings) is None
    assert filtered(group_of(*same), FilterSettings(Rule("grpo"))) is None


@pytest.mark.parametrize(("share", "taken"), [(0.0, True), (0.49, True), (0.5, False), (1.0, False)])
@pytest.mark.parametrize("reason", sorted(OVER_LONG))
def test_over_long_looks_at_how_trajectories_ended(share: float, taken: bool, reason: str) -> None:
    ends = [end(TrajectoryId(0, s), reward=float(s)) for s in range(4)]
    ends = [e._replace(stop_reason=reason) if s % 2 else e for s, e in enumerate(ends)]
    found = filtered(group_of(*ends), FilterSettings(Rule("grpo"), over_long=share))
    assert found == (Ended(0, GroupState.FILTERED, "over_long", GroupStats(1, 4, 6.0, 1, tokens=1)) if taken else None)


def agents_lengths(rng: np.random.Generator, count: int) -> np.ndarray:
    """Row lengths with a long tail, up to 32k tokens."""
    return np.clip(rng.lognormal(8.5, 0.9, count), 200, 32_768).astype(np.int64)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (8, 1), (16, 2)])
def test_ranks_carry_alike_and_need_few_micro_batches(ranks: int, seed: int) -> None:
    length_R = agents_lengths(np.random.default_rng(seed), 256)
    budget = 131_072
    placement = place(length_R, np.arange(256, dtype=np.int32), ranks, budget)
    heaviest = max(sum(int(length_R[list(chosen)].sum()) for chosen in rank) for rank in placement.ranks)
    assert heaviest <= 1.02 * max(length_R.sum() / ranks, length_R.max())
    assert len(placement.ranks[0]) <= -(-length_R.sum() // (ranks * budget)) + 1


@pytest.mark.parametrize("seed", range(3))
def test_rows_near_the_budget_need_few_micro_batches(seed: int) -> None:
    length_R = np.random.default_rng(seed).integers(3277, 22_938, 64 * 8).astype(np.int64)  # 10 to 70 % of the budget
    placement = place(length_R, np.arange(len(length_R), dtype=np.int32), 8, 32_768)
    assert len(placement.ranks[0]) <= -(-length_R.sum() // (8 * 32_768)) + 1
    assert sorted(row for rank in placement.ranks for micro in rank for row in micro) == list(range(len(length_R)))
    assert all(length_R[list(micro)].sum() <= 32_768 for rank in placement.ranks for micro in rank)


def test_a_row_longer_than_the_budget_takes_one_micro_batch_and_no_dummies() -> None:
    assert in_bins([[60]], 10, "packed") == [[[0]]]
    assert sorted(in_bins([[100, 5, 5, 5, 5]], 20, "packed")[0], key=len) == [[0], [1, 2, 3, 4]]


def test_a_rank_that_needs_fewer_micro_batches_gets_empty_ones() -> None:
    """Rows of similar length share a micro-batch where alike ones, padded, would be larger than the budget."""
    full, short = in_bins([[10, 10, 10], [5, 5, *[1] * 10]], 10, "padded")
    assert sorted(full) == [[0], [1], [2]]
    assert sorted(map(len, short)) == [0, 2, 10] and sorted(row for rows in short for row in rows) == [*range(12)]
