"""The example that reads SkyRL's step lists."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.examples.skyrl_steps import steps_from_generator_output
from service.handoff.prefixes.merge import merge_steps


def output(**changes: Any) -> dict[str, Any]:
    """Two trajectories: one whose second step continues the first, one whose second step does not."""
    ids = [SimpleNamespace(instance_id="q", repetition_id=sample) for sample in (0, 0, 1, 1)]
    made: dict[str, Any] = {
        "prompt_token_ids": [[10, 20, 30], [10, 20, 30, 40, 50, 60, 70], [1, 2], [1, 9]],
        "response_ids": [[40, 50], [80, 90], [3], [4, 5]],
        "rewards": [0.25, 1.0, 0.0, 0.5],
        "loss_masks": [[1, 1], [1, 0], [1], [1, 1]],
        "stop_reasons": ["stop", "length", "stop", "stop"],
        "rollout_logprobs": [[-0.5, -0.25], [-1.0, 0.0], [-2.0], [-0.125, -4.0]],
        "trajectory_ids": ids,
        "is_last_step": [False, True, False, True],
        "rollout_metrics": {"generate/avg_num_tokens": 1.75},
    }
    return made | changes


def test_a_generator_output_merges_into_rows() -> None:
    rows = merge_steps(steps_from_generator_output(output()))
    assert [row.prompt_ids.tolist() for row in rows] == [[10, 20, 30], [1, 2], [1, 9]]
    assert [row.response_ids.tolist() for row in rows] == [[40, 50, 60, 70, 80, 90], [3], [4, 5]]
    assert [row.loss_mask.astype(int).tolist() for row in rows] == [[1, 1, 0, 0, 1, 0], [1], [1, 1]]
    logprobs = [row.logprobs.tolist() for row in rows if row.logprobs is not None]
    assert logprobs == [[-0.5, -0.25, 0.0, 0.0, -1.0, 0.0], [-2.0], [-0.125, -4.0]]
    assert [(row.reward, row.stop_reason, row.trajectory.sample) for row in rows] == [
        (1.0, "length", 0), (0.0, "stop", 1), (0.5, "stop", 1),
    ]  # fmt: skip
    pairs = [("q", 0), ("q", 0), ("q", 1), ("q", 1)]
    again = merge_steps(steps_from_generator_output(output(trajectory_ids=pairs)))
    assert [row.response_ids.tolist() for row in again] == [row.response_ids.tolist() for row in rows]


def test_rewards_per_token_add_up_and_lists_may_be_absent() -> None:
    [first, *_] = merge_steps(
        steps_from_generator_output(output(rewards=[[0.0, 0.5], [0.25, 1.0], [2.0], [0.0, 0.25]]))
    )
    assert first.reward == 1.25
    [step, *_] = steps_from_generator_output(output(rollout_logprobs=None, stop_reasons=None))
    assert step.logprobs is None and step.stop_reason == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"trajectory_ids": [odd] * 4}, r"trajectory_ids\[0\]") for odd in ("p0", ("q", 0, 1), ("q", "0"), 7)),
        ({"is_last_step": [True] * 4}, "entry 1 continues"),
        ({"is_last_step": [False, True, False, False]}, "has no last step"),
        ({"response_ids": [[40, 50], [80, 90], [1 << 40], [4, 5]]}, "response_ids holds what is no int32"),
        ({"rewards": [0.0, 0.0, 0.0]}, "rewards has 3 entries"),
        ({"loss_masks": [[1], [1, 0], [1], [1, 1]]}, "loss_mask|axis"),
    ],
)
def test_what_is_no_generator_output_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        steps_from_generator_output(output(**changes))
