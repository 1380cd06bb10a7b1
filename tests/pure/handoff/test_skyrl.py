from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.handoff import merge_steps
from service.interop.skyrl import (
    SkyRLTrajectoryId,
    merge_generator_output,
    rows_to_generator_output,
    steps_from_generator_output,
)
from service.interop.skyrl.checks import NOT_MERGED
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


def plain_merge(made: dict[str, Any]) -> dict[str, Any]:
    """What a merged output holds, a token at a time: the independent reference."""
    with_logprobs, per_token = made["rollout_logprobs"] is not None, isinstance(made["rewards"][0], list)
    prompts: list[list[int]] = []
    cells: list[list[tuple[int, int, float, float]]] = []
    """Of each row its tokens with mask, log-probability and reward."""
    lasts: list[int] = []
    for k, prompt in enumerate(made["prompt_token_ids"]):
        so_far = prompts[-1] + [cell[0] for cell in cells[-1]] if prompts else []
        if k == 0 or made["is_last_step"][k - 1] or prompt[: len(so_far)] != so_far:
            prompts.append(prompt)
            cells.append([])
            lasts.append(k)
            so_far = prompt
        cells[-1] += [(token, 0, 0.0, 0.0) for token in prompt[len(so_far) :]]
        for t, token in enumerate(made["response_ids"][k]):
            logprob = made["rollout_logprobs"][k][t] if with_logprobs else 0.0
            reward = made["rewards"][k][t] if per_token else 0.0
            cells[-1].append((token, made["loss_masks"][k][t], logprob, reward))
        lasts[-1] = k
    columns = [[[cell[c] for cell in row] for row in cells] for c in range(4)]
    found = {name: made[name] and [made[name][k] for k in lasts] for name in ("rewards", "stop_reasons")}
    found |= {name: [made[name][k] for k in lasts] for name in ("trajectory_ids", "is_last_step")}
    found |= {"prompt_token_ids": prompts, "response_ids": columns[0], "loss_masks": columns[1]}
    found |= {"rollout_logprobs": columns[2] if with_logprobs else None, "trajectory_generation_times": None}
    return found | ({"rewards": columns[3]} if per_token else {})


@st.composite
def outputs(draw: st.DrawFn) -> dict[str, Any]:
    """Trajectories of few tokens, so that prefixes hold by chance too; some prompts leave out what came before."""
    per_token, tokens = draw(st.booleans()), st.lists(st.integers(0, 2), max_size=4)
    numbers = st.floats(-2, 2, allow_nan=False)
    made: dict[str, Any] = {name: [] for name in output()} | {"rollout_metrics": {"old": 1}, "env_metrics": []}
    for sample in range(draw(st.integers(1, 3))):
        history, n_steps = draw(tokens), draw(st.integers(1, 5))
        for step in range(n_steps):
            response = draw(tokens)
            made["prompt_token_ids"].append(list(history))
            made["response_ids"].append(response)
            made["loss_masks"].append(draw(st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response))))
            logprobs = draw(st.lists(numbers, min_size=len(response), max_size=len(response)))
            made["rollout_logprobs"].append(logprobs)
            made["rewards"].append([-number for number in logprobs] if per_token else draw(numbers))
            made["stop_reasons"].append(draw(st.sampled_from(["stop", "length"])))
            made["trajectory_ids"].append(PeerId("q", sample))
            made["is_last_step"].append(step == n_steps - 1)
            made["env_metrics"].append({})
            history = draw(st.sampled_from([history + response, history + response, history[1:], response]))
            history = history + draw(tokens)
    absent = draw(st.sets(st.sampled_from(["rollout_logprobs", "stop_reasons", "env_metrics"])))
    return made | dict.fromkeys(["rollout_expert_indices", *absent])


@given(outputs())
def test_merging_lists_equals_a_plain_merge_and_leaves_the_input_alone(made: dict[str, Any]) -> None:
    before = copy.deepcopy(made)
    found = merge_generator_output(made)
    assert made == before
    assert {name: value for name, value in found.items() if name != "rollout_metrics"} == plain_merge(made)
    for name in ("prompt_token_ids", "response_ids", "loss_masks"):
        for row in found[name]:
            row.append(7)
    assert made == before, "the rows are lists of their own"


def test_merging_lists_equals_merging_steps() -> None:
    found, over_steps = merge_generator_output(output()), merged()
    assert found["trajectory_ids"] == [PeerId("q", 0), PeerId("q", 1), PeerId("q", 1)]
    same = set(over_steps) - {"trajectory_ids", "rollout_metrics", "rollout_expert_indices"}
    assert {name: found[name] for name in same} == {name: over_steps[name] for name in same}


def test_merging_again_changes_nothing() -> None:
    once = merge_generator_output(output())
    assert merge_generator_output(once) == once


def test_the_metrics_of_merged_rows_have_skyrls_names() -> None:
    found = merge_generator_output(output())["rollout_metrics"]
    assert found["generate/max_num_tokens"] == 6 and found["generate/avg_num_tokens"] == 3
    assert found["generate/avg_assistant_tokens"] == 2 and found["generate/max_assistant_tokens"] == 3
    assert found["generate/avg_tokens_non_zero_rewards"] == 4 and found["generate/avg_tokens_zero_rewards"] == 1
    assert found["generate/tokens_per_turn_mean"] == 1.5 and found["generate/tokens_per_turn_max"] == 2
    masked = merge_generator_output(output(loss_masks=[[0, 0], [0, 0], [0], [0, 0]]))["rollout_metrics"]
    assert masked["generate/avg_assistant_tokens"] == 0 and "generate/tokens_per_turn_mean" not in masked


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trajectory_ids": None}, "trajectory_ids is missing"),
        ({"is_last_step": None}, "is_last_step is missing"),
        ({"rewards": [0.0] * 3}, "rewards has 3 entries; response_ids has 4"),
        ({name: [] for name in output() if name not in NOT_MERGED | {"rollout_metrics": ""}}, "response_ids is empty"),
        ({"rollout_expert_indices": [[[[1]]]] * 4}, "rollout_expert_indices cannot be merged"),
        ({"pixel_values": [None] * 4}, "pixel_values cannot be merged: .* images"),
        ({"image_grid_thw": [None] * 4}, "image_grid_thw cannot be merged"),
        ({"rollout_sample_support": [None] * 4}, "rollout_sample_support cannot be merged"),
        ({"response_ids": [[40, 50], (80, 90), [3], [4, 5]]}, r"response_ids\[1\] is of type tuple"),
        ({"prompt_token_ids": [[1], [2], np.ones(2), [3]]}, r"prompt_token_ids\[2\] is of type ndarray"),
        ({"loss_masks": [[1, 1], [1], [1], [1, 1]]}, r"loss_masks\[1\] has 1 elements; response_ids\[1\] has 2 tokens"),
        ({"loss_masks": [[1, 1], [1, 0], [1], [1, 2]]}, r"loss_masks\[3\] holds a value that is neither 0 nor 1"),
        ({"loss_masks": [[1, 1], [1, 0], [None], [1, 1]]}, r"loss_masks\[2\] holds a value"),
        ({"rollout_logprobs": [[-1.0] * 2, None, [-1.0], [-1.0] * 2]}, r"rollout_logprobs\[1\] is of type NoneType"),
        ({"rollout_logprobs": [[-1.0] * 2] * 4}, r"rollout_logprobs\[2\] has 2 elements; response_ids\[2\] has 1"),
        ({"rewards": [0.0, [0.0, 1.0], 0.0, 0.0]}, r"rewards\[1\] is \[0.0, 1.0\]; it must be a number"),
        ({"rewards": [[0.0, 1.0], 1.0, [0.0], [0.0, 0.0]]}, r"rewards\[1\] is of type float; it must be a list"),
        ({"rewards": [[0.0, 1.0], [0.0], [0.0], [0.0, 0.0]]}, r"rewards\[1\] has 1 elements"),
        ({"rewards": [0.0, 0.0, None, 0.0]}, r"rewards\[2\] is None; it must be a number"),
        ({"is_last_step": [False, 1, False, True]}, r"is_last_step\[1\] is 1; it must be True or False"),
        ({"is_last_step": [False, True, False, False]}, r"is_last_step\[3\] is False: .* has no last step"),
        ({"is_last_step": [False, False, False, True]}, r"trajectory_ids\[2\] is .* is_last_step\[1\] is False"),
        ({"is_last_step": [True] * 4}, r"trajectory_ids\[1\] is .* whose last step came before it"),
        ({"trajectory_ids": [("q", 0), ("q", 1)] * 2}, r"trajectory_ids\[1\] is \('q', 1\), but trajectory \('q', 0\)"),
        ({"trajectory_ids": ["q"] * 4}, r"trajectory_ids\[1\] is 'q'; it must be a pair"),
        *(
            (
                {"trajectory_ids": [("q", odd)] * 4},
                r"trajectory_ids\[1\] is \('q', .*\); it must be a pair .* whole number",
            )
            for odd in (None, float("inf"), 0.5, "0")
        ),
        ({"trajectory_ids": [SimpleNamespace(instance_id="q")] * 4}, r"trajectory_ids\[1\] is .*; it must be a pair"),
        ({"rewards": [0.0, 10**400, 0.0, 0.0]}, r"rewards\[1\] is 10+; it must be a number"),
        ({"rewards": ["0.5", 0.0, 0.0, 0.0]}, r"rewards\[0\] is '0.5'; it must be a number"),
        ({"rewards": (reward for reward in range(4))}, "rewards is of type generator; it must be a list"),
        ({"rewards": {0.0, 1.0, 2.0, 3.0}}, "rewards is of type set; it must be a list"),
        ({"response_ids": np.ones((4, 1))}, "response_ids is of type ndarray; it must be a list"),
        ({"stop_reasons": 5}, "stop_reasons is of type int; it must be a list"),
        ({"prompt_token_ids": [[None, 20, 30], [10, 20, 30, 40, 50, 60, 70], [1], [2]]}, "no token id"),
    ],
)
def test_an_output_that_cannot_be_merged_is_refused_with_field_and_entry(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        merge_generator_output(output(**changes))


@pytest.mark.parametrize("odd", [None, [], "text"])
def test_what_is_no_generator_output_is_refused(odd: Any) -> None:
    with pytest.raises(ValueError, match=f"is of type {type(odd).__name__}; it must be a dict of lists"):
        merge_generator_output(odd)
