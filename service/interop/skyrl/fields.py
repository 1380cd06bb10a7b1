"""The fields of SkyRL's `GeneratorOutput`, and whose entry each entry is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PER_ENTRY = (
    "prompt_token_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids",
    "rollout_expert_indices", "is_last_step",
)  # fmt: skip
"""The lists that have one element an entry, as `response_ids` has."""


class SkyRLTrajectoryId(NamedTuple):
    """SkyRL's identity of a trajectory."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """As SkyRL prints it."""
        return f"{self.instance_id}_{self.repetition_id}"


def check_lengths(output: Mapping[str, Any]) -> None:
    """ValueError where a list is longer or shorter than `response_ids`."""
    count = len(output["response_ids"])
    for name in PER_ENTRY:
        if output.get(name) is not None and len(output[name]) != count:
            raise ValueError(f"{name} has {len(output[name])} entries; response_ids has {count}")


def identity(trajectory_id: Any, k: int) -> tuple[str, int]:
    """The prompt of entry `k`, and which of that prompt's trajectories the entry belongs to.

    Raises:
        ValueError: the id is neither a pair nor an object with SkyRL's two attributes.
    """
    if hasattr(trajectory_id, "instance_id"):
        return str(trajectory_id.instance_id), int(trajectory_id.repetition_id)
    if isinstance(trajectory_id, str) or not isinstance(trajectory_id, Sequence) or len(trajectory_id) != 2:
        raise ValueError(
            f"trajectory_ids[{k}] is {trajectory_id!r}; it must be a pair (instance_id, repetition_id), or an object "
            "with these attributes"
        )
    instance_id, repetition_id = trajectory_id
    return str(instance_id), int(repetition_id)
