"""What a generator output must hold to be merged; each error names the field, the entry and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

PER_ENTRY = (
    "prompt_token_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids",
    "rollout_expert_indices", "is_last_step",
)  # fmt: skip
"""The lists that have one element an entry, as `response_ids` has."""

REQUIRED = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "trajectory_ids", "is_last_step")
NOT_MERGED = {
    "rollout_expert_indices": "SkyRL has no merged form of it; `merge_steps` merges routed experts as steps",
    "rollout_sample_support": "it is per token, and the support of an observation is unknown",
    "pixel_values": "merged rows have no place for the images of each turn",
    "image_grid_thw": "merged rows have no place for the images of each turn",
}
"""Fields that are refused unless they are None, with the reason."""


class SkyRLTrajectoryId(NamedTuple):
    """SkyRL's identity of a trajectory."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """As SkyRL prints it."""
        return f"{self.instance_id}_{self.repetition_id}"


def identity(trajectory_id: Any, k: int) -> tuple[str, int]:
    """The prompt of entry `k`, and which of that prompt's trajectories the entry belongs to.

    Raises:
        ValueError: the id is neither a pair nor an object with SkyRL's two attributes.
    """
    try:
        if hasattr(trajectory_id, "instance_id"):
            return str(trajectory_id.instance_id), index(trajectory_id.repetition_id)
        if isinstance(trajectory_id, Sequence) and not isinstance(trajectory_id, str) and len(trajectory_id) == 2:
            return str(trajectory_id[0]), index(trajectory_id[1])
    except (AttributeError, TypeError):
        pass  # refused below
    raise ValueError(
        f"trajectory_ids[{k}] is {trajectory_id!r}; it must be a pair (instance_id, repetition_id), or an object "
        "with these attributes, the second a whole number"
    )


def check_lengths(output: Mapping[str, Any]) -> None:
    """ValueError where a field is no list, or is longer or shorter than `response_ids`."""
    present = {name: output[name] for name in ("response_ids", *PER_ENTRY) if output.get(name) is not None}
    for name, entries in present.items():
        if not isinstance(entries, Sequence) or isinstance(entries, str | bytes):
            raise ValueError(f"{name} is of type {type(entries).__name__}; it must be a list, one element an entry")
        if len(entries) != len(output["response_ids"]):
            raise ValueError(f"{name} has {len(entries)} entries; response_ids has {len(output['response_ids'])}")


def check_mergeable(output: Mapping[str, Any]) -> None:
    """ValueError unless this is a step-wise generator output of which every field can be merged."""
    if not isinstance(output, Mapping):
        raise ValueError(f"the generator output is of type {type(output).__name__}; it must be a dict of lists")
    for name in REQUIRED:
        if output.get(name) is None:
            raise ValueError(f"{name} is missing; a step-wise generator output has it")
    for name, reason in NOT_MERGED.items():
        if output.get(name) is not None:
            raise ValueError(f"{name} cannot be merged: {reason}")
    check_lengths(output)
    responses, rewards = output["response_ids"], output["rewards"]
    if not responses:
        raise ValueError("response_ids is empty; there is nothing to merge")
    rewards_are_lists = isinstance(rewards[0], list)
    per_token = ("loss_masks", "rollout_logprobs", *(("rewards",) if rewards_are_lists else ()))
    for name in ("prompt_token_ids", "response_ids", *per_token):
        for k, value in enumerate(() if output.get(name) is None else output[name]):
            if not isinstance(value, list):
                raise ValueError(f"{name}[{k}] is of type {type(value).__name__}; it must be a list")
            if name in per_token and len(value) != len(responses[k]):
                raise ValueError(
                    f"{name}[{k}] has {len(value)} elements; response_ids[{k}] has {len(responses[k])} tokens"
                )
    for k, reward in enumerate(rewards):
        try:
            float(sum(reward if rewards_are_lists else [reward]))  # a sum takes no text, which float would take
        except (TypeError, ValueError, OverflowError):
            form = "a list of numbers" if rewards_are_lists else "a number"
            raise ValueError(f"rewards[{k}] is {reward!r}; it must be {form}, as rewards[0] is") from None
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
