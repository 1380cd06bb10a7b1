"""Reads the step lists of SkyRL's generators (`GeneratorOutput` with `is_last_step`) as steps.

    {"prompt_token_ids": [[1], [1, 2, 3]], "response_ids": [[2], [4]], "trajectory_ids": [("a", 0), ("a", 0)],
     "is_last_step": [False, True], ...}        ->  steps 0 and 1 of one trajectory of prompt "a"

`merge_steps` makes rows of them, and `complete_groups` the groups of a mini-batch (docs/library.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from baton.library import Step, TrajectoryId

LISTS = ("prompt_token_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids")


def steps_from_generator_output(output: Mapping[str, Any], version: int = 0, first_group_id: int = 0) -> list[Step]:
    """The steps in a `GeneratorOutput`. Each sampled token gets `version`, a packed `PolicyVersion`.

    If there are no `trajectory_ids`, each entry is a trajectory of one step with its own prompt. `first_group_id`: the
    group id of the first prompt. (With different first ids, one list can hold the steps of several outputs.) Routed
    experts are not read.

    Raises:
        ValueError: lists have different lengths, an entry of `trajectory_ids` is malformed, or a trajectory continues
            after its last step or has no last step.
    """
    n_entries = len(output["response_ids"])
    for name in LISTS:
        if output.get(name) is not None and len(output[name]) != n_entries:
            raise ValueError(f"{name} has {len(output[name])} entries; response_ids has {n_entries}")
    ids = output.get("trajectory_ids")
    identities = [(str(k), 0) if ids is None else _identity(ids[k], k) for k in range(n_entries)]
    _check_last_steps(identities, output.get("is_last_step"))
    group_ids: dict[str, int] = {}
    n_steps: dict[tuple[str, int], int] = {}
    steps = []
    for k, (uid, sample) in enumerate(identities):
        group_id = group_ids.setdefault(uid, first_group_id + len(group_ids))
        index = n_steps[uid, sample] = n_steps.get((uid, sample), -1) + 1
        steps.append(_step(output, k, TrajectoryId(group_id, sample), uid, index, version))
    return steps


def _identity(trajectory_id: Any, k: int) -> tuple[str, int]:
    """The prompt of entry `k`, and the number of its trajectory: from SkyRL's `TrajectoryID`, or from a pair of the
    two."""
    if hasattr(trajectory_id, "instance_id"):
        trajectory_id = (trajectory_id.instance_id, trajectory_id.repetition_id)
    if not isinstance(trajectory_id, tuple) or len(trajectory_id) != 2 or not isinstance(trajectory_id[1], int):
        raise ValueError(f"trajectory_ids[{k}] is {trajectory_id!r}; it must be a pair (instance_id, repetition_id)")
    return str(trajectory_id[0]), trajectory_id[1]


def _check_last_steps(identities: Sequence[tuple[str, int]], is_last_step: Sequence[bool] | None) -> None:
    """Raise a ValueError if `is_last_step` and the identities disagree about where trajectories end."""
    if is_last_step is None:
        return
    ended: dict[tuple[str, int], bool] = {}
    for k, (identity, last) in enumerate(zip(identities, is_last_step, strict=True)):
        if ended.get(identity):
            raise ValueError(f"entry {k} continues trajectory {identity}, whose last step came before it")
        ended[identity] = bool(last)
    for identity, done in ended.items():
        if not done:
            raise ValueError(f"trajectory {identity} has no last step: is_last_step is False for all of its entries")


def _step(output: Mapping[str, Any], k: int, trajectory: TrajectoryId, uid: str, index: int, version: int) -> Step:
    loss_mask = np.asarray(output["loss_masks"][k], np.bool_)
    reward, stop_reasons, logprobs = output["rewards"][k], output.get("stop_reasons"), output.get("rollout_logprobs")
    return Step(
        trajectory=trajectory,
        prompt_uid=uid,
        index=index,
        prompt_ids=np.asarray(output["prompt_token_ids"][k]),
        response_ids=np.asarray(output["response_ids"][k]),
        logprobs=None if logprobs is None else np.asarray(logprobs[k], np.float32),
        loss_mask=loss_mask,
        versions=np.where(loss_mask, np.int64(version), np.int64(-1)),  # -1: no policy sampled the token
        reward=float(np.sum(reward, dtype=np.float64)),  # a step's reward is the sum of its tokens' rewards
        stop_reason="" if stop_reasons is None else stop_reasons[k],
    )
