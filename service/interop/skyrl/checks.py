"""What a generator output must hold to be merged; each error names the field, the entry and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.interop.skyrl.fields import check_lengths, identity

REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "trajectory_ids", "is_last_step")
NOT_MERGED = {
    "rollout_expert_indices": "SkyRL has no merged form of it; `merge_steps` merges routed experts as steps",
    "rollout_sample_support": "it is per token, and the support of an observation is unknown",
    "pixel_values": "merged rows have no place for the images of each turn",
    "image_grid_thw": "merged rows have no place for the images of each turn",
}
"""Fields that are refused unless they are None, with the reason."""


def check_mergeable(output: Mapping[str, Any]) -> None:
    """ValueError unless this is a step-wise generator output of which every field can be merged."""
    for name in REQUIRED:
        if output.get(name) is None:
            raise ValueError(f"{name} is missing; a step-wise generator output has it")
    for name, reason in NOT_MERGED.items():
        if output.get(name) is not None:
            raise ValueError(f"{name} cannot be merged: {reason}")
    check_lengths(output)
    responses = output["response_ids"]
    if not responses:
        raise ValueError("response_ids is empty; there is nothing to merge")
    _check_lists("prompt_token_ids", output["prompt_token_ids"])
    _check_lists("response_ids", responses)
    for name in ("loss_masks", "rollout_logprobs"):
        if output.get(name) is not None:
            _check_per_token(name, output[name], responses)
    _check_rewards(output["rewards"], responses)
    _check_trajectories(output["trajectory_ids"], output["is_last_step"])


def mask_bytes(mask: list[int], k: int) -> bytes:
    """The loss mask of entry `k`, a byte a token; ValueError if it holds anything but 0 and 1."""
    try:
        found = bytes(mask)
    except (TypeError, ValueError):
        found = b"\xff"
    if found.translate(None, b"\0\1"):
        raise ValueError(f"loss_masks[{k}] holds a value that is neither 0 nor 1")
    return found


def _check_lists(name: str, values: Iterable[Any]) -> None:
    for k, value in enumerate(values):
        if not isinstance(value, list):
            raise ValueError(f"{name}[{k}] is of type {type(value).__name__}; it must be a list")


def _check_per_token(name: str, values: Sequence[Any], responses: Sequence[list[int]]) -> None:
    _check_lists(name, values)
    for k, (value, response) in enumerate(zip(values, responses, strict=True)):
        if len(value) != len(response):
            raise ValueError(f"{name}[{k}] has {len(value)} elements; response_ids[{k}] has {len(response)} tokens")


def _check_rewards(rewards: Sequence[Any], responses: Sequence[list[int]]) -> None:
    """One number an entry, or one number a token in every entry."""
    per_token = isinstance(rewards[0], list)
    if per_token:
        _check_per_token("rewards", rewards, responses)
    for k, reward in enumerate(rewards):
        try:
            float(sum(reward) if per_token else reward)
        except (TypeError, ValueError):
            form = "a list of numbers" if per_token else "a number"
            raise ValueError(f"rewards[{k}] is {reward!r}; it must be {form}, as rewards[0] is") from None


def _check_trajectories(trajectory_ids: Sequence[Any], is_last_step: Sequence[Any]) -> None:
    """The steps of a trajectory stand together, and the flag is set at the last of them only."""
    first, ended = 0, set()
    for k, last in enumerate(is_last_step):
        if not isinstance(last, bool):
            raise ValueError(f"is_last_step[{k}] is {last!r}; it must be True or False")
        now, before = trajectory_ids[k], trajectory_ids[first]
        if now is not before and now != before:
            raise ValueError(
                f"trajectory_ids[{k}] is {now!r}, but trajectory {before!r} has had no last step: "
                f"is_last_step[{k - 1}] is False"
            )
        if last:
            key = identity(now, k)
            if key in ended:
                raise ValueError(
                    f"trajectory_ids[{first}] is {now!r}, whose last step came before it; the steps of a trajectory "
                    "must stand together"
                )
            ended.add(key)
            first = k + 1
    if first < len(is_last_step):
        raise ValueError(
            f"is_last_step[{len(is_last_step) - 1}] is False: trajectory {trajectory_ids[first]!r} has no last step"
        )
