from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.columns import select
from service.handoff.prefixes.merge import merge, merge_steps
from service.handoff.prefixes.prefix_index import PrefixError
from service.handoff.prefixes.sharing import share_prefixes
from service.handoff.steps.builder import steps_table
from service.handoff.steps.tables import step_objects
from service.types import NO_VERSION, ROUTE_NATIVELY, Extension, TrajectoryId
from tests.pure.handoff.worlds import episode, ids, shared, step, whole_prompts

EXAMPLE = [
    step(0, [10, 20, 30], [40, 50], reward=0.5),
    step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90], reward=1.0),
]


def test_a_step_that_extends_its_predecessor_shares_its_row() -> None:
    [row] = merge_steps(EXAMPLE)
    assert row.prompt_ids.tolist() == [10, 20, 30]
    assert row.response_ids.tolist() == [40, 50, 60, 70, 80, 90]
    assert row.loss_mask.tolist() == [True, True, False, False, True, True]
    assert row.logprobs is not None and row.logprobs.tolist() == [-0.125, -0.25, 0, 0, -1.125, -1.25]
    assert row.versions.tolist() == [0, 0, NO_VERSION, NO_VERSION, 0, 0]
    assert row.rewards.tolist() == [0, 0.5, 0, 0, 0, 1]
    assert (row.first_step, row.last_step, row.reward) == (0, 1, 1.0)


def test_sharing_prefixes_and_writing_them_out_again_gives_the_steps_back() -> None:
    table = steps_table(episode(np.random.default_rng(1), 5))
    small = share_prefixes(table)
    assert len(small.token_ids_N) < len(table.token_ids_N)
    assert (small.extends_K == [-1, 0, 1, 2, 3]).all()
    again = steps_table(whole_prompts(step_objects(small)))
    assert (again.token_ids_N == table.token_ids_N).all() and (again.offsets_K == table.offsets_K).all()


def test_a_full_prompt_is_shared_with_a_step_of_an_earlier_message() -> None:
    table = share_prefixes(steps_table(episode(np.random.default_rng(1), 3)))
    full = steps_table(episode(np.random.default_rng(1), 3))
    before, after = select(table, np.array([0, 1])), select(full, np.array([2]))
    assert share_prefixes(after, before).extends_K.tolist() == [1]
    assert share_prefixes(after).extends_K.tolist() == [-1]


def test_a_step_whose_prefix_differs_opens_a_new_row() -> None:
    steps = [*EXAMPLE, step(2, [10, 20, 30, 40, 51], [1])]
    rows = merge_steps(steps)
    assert [(row.first_step, row.last_step) for row in rows] == [(0, 1), (2, 2)]
    assert rows[1].prompt_ids.tolist() == [10, 20, 30, 40, 51]
    assert merge(steps_table(steps)).counts["forked"] == 1


def test_a_fork_of_a_fork_counts_as_a_fork_and_a_new_start_as_a_reset() -> None:
    steps = [
        step(0, [1, 2], [3, 4, 5]),
        step(1, [1, 2, 3, 9], [6, 7]),  # the end of the first response is gone
        step(2, [1, 2, 3, 8], [6]),  # again, inside what is now a prompt
        step(3, [1, 2, 7], [6]),  # nothing sampled is left
    ]
    for table in (steps_table(steps), share_prefixes(steps_table(steps))):
        counts = merge(table).counts
        assert (counts["forked"], counts["reset"], counts["rows"]) == (2, 1, 4)


def test_a_tree_continues_any_row_and_trains_a_token_once() -> None:
    steps = [
        step(0, [1, 2], [3, 4]),
        step(1, [7], [8]),
        step(2, [1, 2, 3, 4, 5], [6]),
        step(3, [7, 8], [9]),
        step(4, [1, 2, 3, 4], [5]),
    ]
    rows = merge_steps(steps, mode="tree")
    whole = [np.concatenate((row.prompt_ids, row.response_ids)).tolist() for row in rows]
    assert whole == [[1, 2, 3, 4, 5, 6], [7, 8, 9], [1, 2, 3, 4, 5]]
    assert sum(int(row.loss_mask.sum()) for row in rows) == 6
    counts = merge(steps_table(steps), "tree").counts
    assert (counts["extended"], counts["forked"], counts["reset"]) == (2, 1, 1)
    assert merge(steps_table(steps), "linear").counts["extended"] == 0


def test_steps_of_different_temperature_do_not_share_a_row() -> None:
    rows = merge_steps([EXAMPLE[0], replace(EXAMPLE[1], temperature=0.7)])
    assert [row.temperature for row in rows] == [1.0, pytest.approx(0.7)]
    assert rows[1].prompt_ids.tolist() == [10, 20, 30, 40, 50, 60, 70]


def test_absent_logprobs_are_not_zeros() -> None:
    absent = [replace(s, logprobs=None) for s in EXAMPLE]
    [row] = merge_steps(absent)
    assert row.logprobs is None
    assert len(merge_steps([EXAMPLE[0], absent[1]])) == 2


def test_routed_experts_stay_aligned_and_observations_route_natively() -> None:
    steps = [
        replace(s, routed_experts=np.full((len(s.prompt_ids) + len(s.response_ids), 2, 3), s.index, np.int16))
        for s in EXAMPLE
    ]
    [row] = merge_steps(steps)
    assert row.routed_experts is not None and row.routed_experts.shape == (9, 2, 3)
    assert row.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 0, 0, ROUTE_NATIVELY, ROUTE_NATIVELY, 1, 1]


def test_a_reference_to_other_tokens_is_an_error() -> None:
    wrong = replace(shared(EXAMPLE)[1], extends=Extension(0, 5, 12345))
    with pytest.raises(PrefixError, match="step=1 extends other tokens"):
        merge_steps([EXAMPLE[0], wrong])
    with pytest.raises(PrefixError, match="not there"):
        merge_steps([EXAMPLE[0], replace(wrong, extends=Extension(3, 5, 12345))])


def test_interleaved_and_duplicated_steps_give_rows_by_trajectory() -> None:
    a = [replace(s, trajectory=TrajectoryId(5, 1), prompt_uid="p") for s in EXAMPLE]
    b = [replace(s, trajectory=TrajectoryId(5, 0), prompt_uid="p") for s in EXAMPLE]
    rows = merge_steps([a[0], b[0], b[1], a[1], b[0]])
    assert [(row.trajectory.sample, row.last_step) for row in rows] == [(1, 1), (0, 1)]


def test_a_conflicting_duplicate_is_refused() -> None:
    with pytest.raises(ValueError, match="came twice"):
        merge_steps([EXAMPLE[0], replace(EXAMPLE[0], response_ids=ids(40, 51))])


def test_steps_survive_the_table() -> None:
    again = step_objects(steps_table(shared(EXAMPLE)))
    assert again[1].extends == shared(EXAMPLE)[1].extends
    assert again[1].prompt_ids.tolist() == [60, 70]
