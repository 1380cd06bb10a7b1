"""Rows that begin alike are packed together, by the number of their distinct tokens."""

import numpy as np
import pytest

from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.pack import Placement, place, place_sharing, prefix_order
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.types import MiniBatch, TrajectoryId
from tests.pure.handoff.worlds import complete_group, end, step


class World:
    """Prompts with samples: a prompt's tokens, then one to three rows a sample that differ."""

    def __init__(self, seed: int, prompts: int, samples: int, prompt: int, response: int) -> None:
        rng = np.random.default_rng(seed)
        rows, trajectories = [], []
        for p in range(prompts):
            head = rng.integers(0, 50_000, prompt)
            for sample in range(samples):
                turns = head
                for _ in range(int(rng.integers(1, 4))):
                    turns = np.concatenate([turns, rng.integers(0, 50_000, int(rng.integers(1, response)))])
                    rows.append(np.concatenate([turns, rng.integers(0, 50_000, int(rng.integers(1, response)))]))
                    trajectories.append(p * samples + sample)
        order = rng.permutation(len(rows))
        self.rows = [tuple(rows[i].tolist()) for i in order]
        self.trajectory_R = np.array(trajectories, np.int32)[order]
        self.prompt_G = np.repeat(np.arange(prompts, dtype=np.int32), samples)
        self.length_R = np.array([len(row) for row in self.rows], np.int64)
        self.offsets_R = np.cumsum([0, *self.length_R])
        self.token_ids_N = np.concatenate([np.array(row, np.int32) for row in self.rows])

    def placed(self, ranks: int, budget: int) -> Placement:
        order = prefix_order(self.token_ids_N, self.offsets_R)
        return place_sharing(order, self.length_R, self.trajectory_R, self.prompt_G, ranks, budget)

    def distinct(self, rows: tuple[int, ...]) -> int:
        return len({self.rows[row][:end] for row in rows for end in range(1, len(self.rows[row]) + 1)})

    def load(self, rank: tuple[tuple[int, ...], ...]) -> int:
        return self.distinct(tuple(row for micro in rank for row in micro))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ranks", "budget"), [(1, 300), (2, 400), (3, 1200), (4, 120)])
def test_every_row_is_placed_once_within_the_budget_and_trajectories_stay_whole(
    seed: int, ranks: int, budget: int
) -> None:
    world = World(seed, prompts=5, samples=4, prompt=60, response=30)
    placement = world.placed(ranks, budget)
    assert len(placement.ranks) == ranks
    assert len({len(rank) for rank in placement.ranks}) == 1
    assert sorted(row for rank in placement.ranks for micro in rank for row in micro) == list(range(len(world.rows)))
    owners = [{int(world.trajectory_R[row]) for micro in rank for row in micro} for rank in placement.ranks]
    assert sum(len(of_rank) for of_rank in owners) == len(set().union(*owners))
    for rank in placement.ranks:
        for micro in rank:
            assert len(micro) <= 1 or world.distinct(micro) <= budget


def test_the_rows_of_a_prompt_are_packed_together() -> None:
    world = World(0, prompts=6, samples=8, prompt=400, response=30)
    placement = world.placed(ranks=2, budget=4000)
    computed = sum(world.distinct(micro) for rank in placement.ranks for micro in rank)
    assert computed <= 1.02 * world.distinct(tuple(range(len(world.rows))))
    apart = place(world.length_R, world.trajectory_R, 2, 4000)
    assert len(apart.ranks[0]) >= 2 * len(placement.ranks[0])


def test_a_prompt_is_dealt_to_several_ranks_where_they_would_be_unequal_otherwise() -> None:
    world = World(1, prompts=1, samples=16, prompt=40, response=60)
    loads = [world.load(rank) for rank in world.placed(ranks=4, budget=10_000).ranks]
    assert max(loads) <= 1.1 * np.mean(loads)
    assert sum(loads) - world.distinct(tuple(range(len(world.rows)))) == 3 * 40, "each further rank computes the prompt"


def group(rng: np.random.Generator, number: int, prompt: int) -> CompleteGroup:
    """Four samples of one turn each, whose prompts have `prompt` tokens in common."""
    head, steps, ends = rng.integers(0, 50_000, prompt).tolist(), [], []
    for sample in range(4):
        trajectory, uid = TrajectoryId(number, sample), f"p{number}"
        own, response = (rng.integers(0, 50_000, 10).tolist() for _ in range(2))
        steps.append(step(0, head + own, response, trajectory=trajectory, uid=uid))
        ends.append(end(trajectory, 1, float(sample % 2), uid))
    return complete_group(steps, ends)


def formed(layout: str, prompt: int) -> MiniBatch:
    rng = np.random.default_rng(9)
    groups = [group(rng, number, prompt) for number in range(4)]
    settings = BatchSettings(ranks=2, token_budget=4096, layout=layout)  # type: ignore[arg-type]
    return form_mini_batch(0, groups, VersionHistory(), settings)


def test_automatic_sharing_takes_place_where_it_saves_a_tenth_of_the_tokens() -> None:
    shared, automatic, packed = (formed(layout, prompt=80) for layout in ("shared_prefix", "auto", "packed"))
    ratio = automatic.metrics["generate/batch_distinct_ratio"]
    assert ratio < 0.9 and "generate/batch_distinct_ratio" not in packed.metrics
    assert automatic.metrics["generate/batch_computed_ratio"] == pytest.approx(ratio, abs=0.05)
    assert automatic.metrics == shared.metrics
    apart = formed("auto", prompt=0)
    assert apart.metrics["generate/batch_distinct_ratio"] > 0.9
    assert "generate/batch_computed_ratio" not in apart.metrics
