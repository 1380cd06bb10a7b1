from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from service.handoff import merge_steps
from service.interop.skyrl import SkyRLTrajectoryId, rows_to_generator_output, steps_from_generator_output
from service.types import ROUTE_NATIVELY


@dataclass
class PeerId:
    instance_id: str
    repetition_id: int


def output(**changes: Any) -> dict[str, Any]:
    """Two trajectories: one whose second step continues the first, one whose second step does not."""
    made: dict[str, Any] = {
        "prompt_token_ids": [[10, 20, 30], [10, 20, 30, 40, 50, 60, 70], [1, 2], [1, 9]],
        "response_ids": [[40, 50], [80, 90], [3], [4, 5]],
        "rewards": [0.25, 1.0, 0.0, 0.1],
        "loss_masks": [[1, 1], [1, 0], [1], [1, 1]],
        "stop_reasons": ["stop", "length", "stop", "stop"],
        "rollout_logprobs": [[-0.5, -0.25], [-1.0, 0.0], [-2.0], [-0.125, -4.0]],
        "trajectory_ids": [PeerId("q", 0), PeerId("q", 0), PeerId("q", 1), PeerId("q", 1)],
        "is_last_step": [False, True, False, True],
        "rollout_expert_indices": None,
        "rollout_metrics": {"generate/avg_num_tokens": 1.75},
    }
    return made | changes


def merged(**changes: Any) -> dict[str, Any]:
    return rows_to_generator_output(merge_steps(steps_from_generator_output(output(**changes))))


def test_a_generator_output_merges_as_lists_and_comes_back_as_lists() -> None:
    found = merged()
    assert found["prompt_token_ids"] == [[10, 20, 30], [1, 2], [1, 9]]
    assert found["response_ids"] == [[40, 50, 60, 70, 80, 90], [3], [4, 5]]
    assert found["loss_masks"] == [[1, 1, 0, 0, 1, 0], [1], [1, 1]]
    assert found["rollout_logprobs"] == [[-0.5, -0.25, 0.0, 0.0, -1.0, 0.0], [-2.0], [-0.125, -4.0]]
    assert found["rewards"] == [1.0, 0.0, 0.1]
    assert found["stop_reasons"] == ["length", "stop", "stop"]
    assert found["is_last_step"] == [True, False, True]
    assert found["trajectory_ids"] == [("q", 0), ("q", 1), ("q", 1)]
    assert found["rollout_expert_indices"] is None and found["rollout_metrics"] is None


def test_rewards_per_token_stay_per_token() -> None:
    found = merged(rewards=[[0.0, 0.5], [0.0, 1.0], [2.0], [0.0, 0.25]])
    assert found["rewards"] == [[0.0, 0.5, 0.0, 0.0, 0.0, 1.0], [2.0], [0.0, 0.25]]


def test_an_identity_may_be_a_pair_or_have_attributes() -> None:
    pairs = [("q", 0), ("q", 0), ("q", 1), ("q", 1)]
    assert merged(trajectory_ids=pairs) == merged()
    assert SkyRLTrajectoryId("q", 1).to_string() == "q_1"


def test_what_is_absent_stays_absent() -> None:
    found = merged(rollout_logprobs=None, stop_reasons=None)
    assert found["rollout_logprobs"] is None and found["stop_reasons"] is None
    assert merged(rollout_logprobs=[[-1.0, -1.0], [-1.0, -1.0], [-1.0], [-1.0, -1.0]])["rollout_logprobs"] is not None


def test_entries_without_identities_are_trajectories_of_one_step() -> None:
    steps = steps_from_generator_output(output(trajectory_ids=None, is_last_step=None))
    assert len({step.trajectory for step in steps}) == 4
    assert len(merge_steps(steps)) == 4


def test_prompts_of_entries_without_identities_can_be_named() -> None:
    steps = steps_from_generator_output(output(trajectory_ids=None, is_last_step=None), uids=["a", "a", "b", "a"])
    found = [(str(step.trajectory), step.prompt_uid) for step in steps]
    assert found == [
        ("group=0/sample=0/attempt=0", "a"),
        ("group=0/sample=1/attempt=0", "a"),
        ("group=1/sample=0/attempt=0", "b"),
        ("group=0/sample=2/attempt=0", "a"),
    ]
    with pytest.raises(ValueError, match="uids has 1 entries"):
        steps_from_generator_output(output(trajectory_ids=None, is_last_step=None), uids=["a"])
    with pytest.raises(ValueError, match="leave uids out"):
        steps_from_generator_output(output(), uids=["a"] * 4)


def test_two_outputs_stand_in_one_list() -> None:
    first = steps_from_generator_output(output())
    second = steps_from_generator_output(output(), first_group_id=1)
    assert len(merge_steps([*first, *second])) == 2 * len(merge_steps(first))


@pytest.mark.parametrize("identity", ["p0", "p10", ("q", 0, 1), 7])
def test_what_is_no_identity_is_named(identity: Any) -> None:
    with pytest.raises(ValueError, match=r"trajectory_ids\[0\] is .*must be a pair"):
        steps_from_generator_output(output(trajectory_ids=[identity] * 4))


def test_a_trajectory_ends_where_its_last_step_is() -> None:
    with pytest.raises(ValueError, match=r"entry 1 goes on with trajectory \('q', 0\)"):
        steps_from_generator_output(output(is_last_step=[True] * 4))
    with pytest.raises(ValueError, match=r"\('q', 1\) has no last step"):
        steps_from_generator_output(output(is_last_step=[False, True, False, False]))


def test_log_probabilities_of_some_rows_are_not_dropped_in_silence() -> None:
    rows = merge_steps(steps_from_generator_output(output()))
    with pytest.raises(ValueError, match="2 of 3 rows have log-probabilities"):
        rows_to_generator_output([replace(rows[0], logprobs=None), *rows[1:]])


def test_a_token_id_beyond_int32_is_named_with_its_entry() -> None:
    with pytest.raises(ValueError, match=r"response_ids\[2\] holds what is no int32"):
        steps_from_generator_output(output(response_ids=[[40, 50], [80, 90], [1 << 40], [4, 5]]))


def test_the_keys_are_skyrls_in_their_order() -> None:
    assert list(merged()) == [
        "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_metrics",
        "rollout_logprobs", "trajectory_ids", "trajectory_generation_times", "rollout_expert_indices", "is_last_step",
    ]  # fmt: skip


def test_routed_experts_may_lack_the_last_tokens() -> None:
    experts = [[[[7]]] * 4, [[[8]]] * 8, [], [[[9]]] * 4]
    steps = steps_from_generator_output(output(rollout_expert_indices=experts))
    found = [step.routed_experts for step in steps]
    assert all(e is not None for e in found)
    assert [np.ravel(e).tolist() for e in (found[0], found[2])] == [[7, 7, 7, 7, ROUTE_NATIVELY], [ROUTE_NATIVELY] * 3]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards has 3 entries; response_ids has 4"):
        steps_from_generator_output(output(rewards=[0.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"loss_mask|axis"):
        steps_from_generator_output(output(loss_masks=[[1], [1, 0], [1], [1, 1]]))
