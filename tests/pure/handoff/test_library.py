"""The core called directly, without the buffer's door in front: what would be wrong in silence is an error."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.handoff.batches.batch import BatchSettings, complete_groups, form_mini_batch
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import Mode, merge_steps
from service.types import PolicyVersion, Step, TrajectoryId
from tests.pure.handoff.worlds import complete_group, end, step

SETTINGS = BatchSettings(ranks=1, token_budget=64)


def form(*steps: Step, history: VersionHistory | None = None) -> Any:
    return form_mini_batch(0, [complete_group(steps, [end(steps=len(steps))])], history or VersionHistory(), SETTINGS)


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"token_budget": 0}, {"mode": "Linear"}])
def test_settings_of_a_mini_batch_are_checked_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BatchSettings(**{"ranks": 1, "token_budget": 8} | wrong)


def test_tokens_without_log_probabilities_are_not_trained_against_zero() -> None:
    bare = replace(step(1, [1, 2, 3], [4]), logprobs=None)
    with pytest.raises(ValueError, match=r"step=1 has tokens to train, but logprobs=None"):
        form(step(0, [1], [2]), bare)
    masked = replace(bare, loss_mask=np.zeros(1, np.bool_), versions=np.full(1, -1, np.int64))
    assert form(step(0, [1], [2]), masked).loss_tokens_G.tolist() == [1]


def test_a_version_ahead_of_the_history_is_an_error() -> None:
    ahead = step(0, [1], [2], version=PolicyVersion(0, 7).pack())
    with pytest.raises(ValueError, match=r"step=0 was sampled at a version newer than 0:0"):
        form(ahead)
    assert form(ahead, history=VersionHistory(PolicyVersion(0, 7))).metrics["async/staleness_mean"] == 0


@pytest.mark.parametrize("ids", [np.array([1 << 40]), np.array([-5]), np.array([1.5]), [1 << 31]])
@pytest.mark.parametrize("name", ["prompt_ids", "response_ids"])
def test_a_token_id_that_would_wrap_around_is_an_error(name: str, ids: Any) -> None:
    with pytest.raises(ValueError, match=rf"Step\.{name} holds what is no int32 token id"):
        replace(step(0, [1], [2]), **{name: ids})


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (lambda a, b: [a, replace(b, prompt_uid="other")], "step=1 is of prompt 'other', but its trajectory began"),
        (lambda a, b: [a, replace(b, index=2)], "step=2 is there, but step 1 before it is not"),
        (lambda a, b: [b], "step=1 is there, but step 0 before it is not"),
        (lambda a, b: [replace(a, index=-1), b], "step=-1"),
        (lambda a, b: [b, a, b], "step=1 came twice"),
    ],
)
def test_a_trajectory_of_two_prompts_or_with_a_gap_is_not_merged(
    steps: Callable[[Step, Step], list[Step]], said: str
) -> None:
    a, b = step(0, [1], [2]), step(1, [1, 2, 3], [4])
    with pytest.raises(ValueError, match=said):
        merge_steps([step(0, [9], [9], trajectory=TrajectoryId(1, 0), uid="z"), *steps(a, b)])


@pytest.mark.parametrize(("mode", "rows"), [("off", 2), ("linear", 1), ("tree", 1)])
def test_each_step_is_a_row_of_its_own_if_merging_is_off(mode: Mode, rows: int) -> None:
    assert len(merge_steps([step(0, [1], [2]), step(1, [1, 2, 3], [4])], mode)) == rows


@pytest.mark.parametrize(
    ("steps", "ends", "said"),
    [
        ([step(0, [1], [2])], [], "a trajectory of steps has no end"),
        ([step(0, [1], [2])], [end(steps=2)], "ended after 2 steps, but 1 are there"),
        ([step(0, [1], [2])], [end(), end()], "it ends twice"),
        ([step(0, [1], [2])], [end(TrajectoryId(0, 1), 0), end(TrajectoryId(0, 1))], "has no end"),
        ([step(0, [1], [2])], [end(uid="b")], "group=0 has the prompts 'a' and 'b'"),
        ([step(1, [1], [2])], None, "step=1 is there, but step 0 before it is not"),
    ],
)
def test_groups_are_complete_or_an_error(steps: list[Step], ends: list[Any] | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        complete_groups(steps, ends)


def test_groups_come_in_order_of_appearance_and_a_trajectory_may_have_no_step() -> None:
    late = step(0, [1], [2], trajectory=TrajectoryId(7, 0), uid="b", reward=2.0)
    ends = [end(TrajectoryId(7, 0), 1, 3.0, "b"), end(steps=0), end(TrajectoryId(7, 1), 0, 0.0, "b")]
    groups = complete_groups([late], ends)
    assert [(g.group_id, g.prompt_uid, len(g.steps), len(g.ends)) for g in groups] == [(7, "b", 1, 2), (0, "a", 0, 1)]
    batch = form_mini_batch(0, groups, VersionHistory(), SETTINGS)
    assert batch.groups == (7, 0) and batch.return_G.tolist() == [3, 0, 0]
    assert [g.ends.reward_E.tolist() for g in complete_groups([late])] == [[2.0]]
