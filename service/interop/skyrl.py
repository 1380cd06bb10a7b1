"""SkyRL's step-wise `GeneratorOutput` to steps, and rows back to it.

    {"prompt_token_ids": [[1], [1, 2, 3]], "response_ids": [[2], [4]], "trajectory_ids": [("a", 0), ("a", 0)],
     "is_last_step": [False, True], ...}        ->  steps 0 and 1 of one trajectory of prompt "a"

Entries of one trajectory are its steps, in their order; entries without `trajectory_ids` are trajectories of one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from service.types import NO_VERSION, ROUTE_NATIVELY, Bools, Int16s, Int64s, Row, Step, TrajectoryId


class SkyRLTrajectoryId(NamedTuple):
    """SkyRL's identity of a trajectory."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """As SkyRL prints it."""
        return f"{self.instance_id}_{self.repetition_id}"


def steps_from_generator_output(output: Mapping[str, Any], version: int = 0) -> list[Step]:
    """The steps in a generator output; what the policy sampled there gets the packed `version`."""
    count = len(output["response_ids"])
    for name in _PER_ENTRY:
        if output.get(name) is not None and len(output[name]) != count:
            raise ValueError(f"{name} has {len(output[name])} entries; response_ids has {count}")
    ordinals: dict[str, int] = {}
    n_steps: dict[tuple[str, int], int] = {}
    steps = []
    for k in range(count):
        uid, sample = _identity(output, k)
        index = n_steps.setdefault((uid, sample), 0)
        n_steps[uid, sample] = index + 1
        ordinal = ordinals.setdefault(uid, len(ordinals))
        steps.append(_step(output, k, TrajectoryId(ordinal, sample), uid, index, version))
    return steps


def rows_to_generator_output(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as SkyRL's parallel lists; a trajectory's rows stand together, and the last of them is its last step."""
    last_row = {row.trajectory: r for r, row in enumerate(rows)}
    per_token = any(row.reward is None for row in rows)
    has_logprobs = bool(rows) and all(row.logprobs is not None for row in rows)
    has_experts = bool(rows) and all(row.routed_experts is not None for row in rows)
    return {
        "prompt_token_ids": [row.prompt_ids.tolist() for row in rows],
        "response_ids": [row.response_ids.tolist() for row in rows],
        "rewards": [row.rewards.tolist() if per_token else row.reward for row in rows],
        "loss_masks": [row.loss_mask.astype(int).tolist() for row in rows],
        "stop_reasons": [row.stop_reason for row in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [_list(row.logprobs) for row in rows] if has_logprobs else None,
        "trajectory_ids": [SkyRLTrajectoryId(row.prompt_uid, row.trajectory.sample) for row in rows],
        "rollout_expert_indices": [_list(row.routed_experts) for row in rows] if has_experts else None,
        "is_last_step": [last_row[row.trajectory] == r for r, row in enumerate(rows)],
    }


_PER_ENTRY = (
    "prompt_token_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids",
    "rollout_expert_indices", "is_last_step",
)  # fmt: skip


def _identity(output: Mapping[str, Any], k: int) -> tuple[str, int]:
    trajectory_ids = output.get("trajectory_ids")
    if trajectory_ids is None:
        return str(k), 0
    identity = trajectory_ids[k]
    if hasattr(identity, "instance_id"):
        return str(identity.instance_id), int(identity.repetition_id)
    instance_id, repetition_id = identity
    return str(instance_id), int(repetition_id)


def _step(output: Mapping[str, Any], k: int, trajectory: TrajectoryId, uid: str, index: int, version: int) -> Step:
    loss_mask = np.asarray(output["loss_masks"][k], np.bool_)
    reward, stop_reasons = output["rewards"][k], output.get("stop_reasons")
    logprobs, experts = output.get("rollout_logprobs"), output.get("rollout_expert_indices")
    return Step(
        trajectory=trajectory,
        prompt_uid=uid,
        index=index,
        prompt_ids=np.asarray(output["prompt_token_ids"][k], np.int32),
        response_ids=np.asarray(output["response_ids"][k], np.int32),
        logprobs=None if logprobs is None else np.asarray(logprobs[k], np.float32),
        loss_mask=loss_mask,
        versions=_versions(loss_mask, version),
        reward=np.asarray(reward, np.float32) if np.ndim(reward) else float(reward),
        stop_reason="stop" if stop_reasons is None else stop_reasons[k],
        routed_experts=None
        if experts is None
        else _experts(experts, k, len(output["prompt_token_ids"][k]) + len(loss_mask)),
    )


def _experts(experts: Sequence[Any], k: int, length: int) -> Int16s:
    """[length, layers, topk]; engines leave out the last sampled token, and may leave out whole entries."""
    known = next((np.asarray(entry, np.int16) for entry in experts if len(entry)), np.zeros((0, 0, 0), np.int16))
    experts_T = np.full((length, *known.shape[1:]), ROUTE_NATIVELY, np.int16)
    if len(experts[k]) > length:
        raise ValueError(f"rollout_expert_indices[{k}] has {len(experts[k])} tokens; the entry has {length}")
    if len(experts[k]):
        experts_T[: len(experts[k])] = experts[k]
    return experts_T


def _versions(loss_mask: Bools, version: int) -> Int64s:
    return np.where(loss_mask, np.int64(version), np.int64(NO_VERSION))


def _list(array: Any) -> list[Any]:
    return array.tolist()  # type: ignore[no-any-return]
