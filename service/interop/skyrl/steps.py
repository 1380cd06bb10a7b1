"""SkyRL's step-wise `GeneratorOutput` to steps, and rows back to it.

    {"prompt_token_ids": [[1], [1, 2, 3]], "response_ids": [[2], [4]], "trajectory_ids": [("a", 0), ("a", 0)],
     "is_last_step": [False, True], ...}        ->  steps 0 and 1 of one trajectory of prompt "a"

Entries of one trajectory are its steps, in their order; entries without `trajectory_ids` are trajectories of one step.
Rows hold no wall-clock times, so `trajectory_generation_times` is None in an output that is made of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from service.interop.skyrl.checks import SkyRLTrajectoryId, check_lengths, identity
from service.types import (
    NO_VERSION,
    ROUTE_NATIVELY,
    Int16s,
    Row,
    Step,
    TrajectoryId,
    as_token_ids,
)


def steps_from_generator_output(
    output: Mapping[str, Any], version: int = 0, uids: Sequence[str] | None = None, first_group_id: int = 0
) -> list[Step]:
    """The steps in a generator output; what the policy sampled there gets the packed `version`.

    `uids`: per entry its prompt, where there are no `trajectory_ids`; without either every entry is a group of one.
    `first_group_id`: number of the first prompt, so that the steps of several outputs can stand in one list.

    Raises:
        ValueError: lists of different lengths, an identity that is none, a trajectory that goes on after its last step
            or never comes to it.
    """
    check_lengths(output)
    identities = _identities(output, uids)
    _check_last_steps(identities, output.get("is_last_step"))
    group_ids: dict[str, int] = {}
    n_steps: dict[tuple[str, int], int] = {}
    steps = []
    for k, (uid, sample) in enumerate(identities):
        index = n_steps.setdefault((uid, sample), 0)
        n_steps[uid, sample] = index + 1
        group_id = group_ids.setdefault(uid, first_group_id + len(group_ids))
        steps.append(_step(output, k, TrajectoryId(group_id, sample), uid, index, version))
    return steps


def rows_to_generator_output(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows as SkyRL's parallel lists; a trajectory's rows stand together, and the last of them is its last step.

    Raises:
        ValueError: some rows have log-probabilities and some have none, for which those lists have no form.
    """
    last_row = {row.trajectory: r for r, row in enumerate(rows)}
    per_token = any(row.reward is None for row in rows)
    logprobs = [row.logprobs.tolist() for row in rows if row.logprobs is not None]
    if 0 < len(logprobs) < len(rows):
        raise ValueError(
            f"{len(logprobs)} of {len(rows)} rows have log-probabilities; SkyRL takes those of all or none"
        )
    experts = [row.routed_experts.tolist() for row in rows if row.routed_experts is not None]
    return {
        "prompt_token_ids": [row.prompt_ids.tolist() for row in rows],
        "response_ids": [row.response_ids.tolist() for row in rows],
        "rewards": [row.rewards.tolist() if per_token else row.reward for row in rows],
        "loss_masks": [row.loss_mask.astype(int).tolist() for row in rows],
        "stop_reasons": [row.stop_reason for row in rows] if any(row.stop_reason for row in rows) else None,
        "rollout_metrics": None,
        "rollout_logprobs": logprobs or None,
        "trajectory_ids": [SkyRLTrajectoryId(row.prompt_uid, row.trajectory.sample) for row in rows],
        "trajectory_generation_times": None,
        "rollout_expert_indices": experts if rows and len(experts) == len(rows) else None,
        "is_last_step": [last_row[row.trajectory] == r for r, row in enumerate(rows)],
    }


def _identities(output: Mapping[str, Any], uids: Sequence[str] | None) -> list[tuple[str, int]]:
    """Of each entry its prompt, and which of that prompt's trajectories it belongs to."""
    trajectory_ids, count = output.get("trajectory_ids"), len(output["response_ids"])
    if trajectory_ids is not None:
        if uids is not None:
            raise ValueError("trajectory_ids name the prompts already; leave uids out")
        return [identity(trajectory_id, k) for k, trajectory_id in enumerate(trajectory_ids)]
    if uids is None:
        return [(str(k), 0) for k in range(count)]
    if len(uids) != count:
        raise ValueError(f"uids has {len(uids)} entries; response_ids has {count}")
    samples: dict[str, int] = {}
    identities = []
    for uid in map(str, uids):
        identities.append((uid, samples.get(uid, 0)))
        samples[uid] = samples.get(uid, 0) + 1
    return identities


def _check_last_steps(identities: Sequence[tuple[str, int]], is_last_step: Sequence[Any] | None) -> None:
    """ValueError where the flags and the identities disagree about where trajectories end."""
    if is_last_step is None:
        return
    ended: dict[tuple[str, int], bool] = {}
    for k, (key, last) in enumerate(zip(identities, is_last_step, strict=True)):
        if ended.get(key):
            raise ValueError(f"entry {k} goes on with trajectory {key}, whose last step came before it")
        ended[key] = bool(last)
    for key, done in ended.items():
        if not done:
            raise ValueError(f"trajectory {key} has no last step: is_last_step is False for all of its entries")


def _step(output: Mapping[str, Any], k: int, trajectory: TrajectoryId, uid: str, index: int, version: int) -> Step:
    loss_mask = np.asarray(output["loss_masks"][k], np.bool_)
    reward, stop_reasons = output["rewards"][k], output.get("stop_reasons")
    logprobs, experts = output.get("rollout_logprobs"), output.get("rollout_expert_indices")
    return Step(
        trajectory=trajectory,
        prompt_uid=uid,
        index=index,
        prompt_ids=as_token_ids(f"prompt_token_ids[{k}]", output["prompt_token_ids"][k]),
        response_ids=as_token_ids(f"response_ids[{k}]", output["response_ids"][k]),
        logprobs=None if logprobs is None else np.asarray(logprobs[k], np.float32),
        loss_mask=loss_mask,
        versions=np.where(loss_mask, np.int64(version), np.int64(NO_VERSION)),
        reward=np.asarray(reward, np.float32) if np.ndim(reward) else float(reward),
        stop_reason="" if stop_reasons is None else stop_reasons[k],
        routed_experts=None if experts is None else _experts(output, k),
    )


def _experts(output: Mapping[str, Any], k: int) -> Int16s:
    """[P + T, layers, topk]; engines leave out the last sampled token, and may leave out whole entries."""
    experts, length = (
        output["rollout_expert_indices"],
        len(output["prompt_token_ids"][k]) + len(output["loss_masks"][k]),
    )
    known = next((np.asarray(entry, np.int16) for entry in experts if len(entry)), np.zeros((0, 0, 0), np.int16))
    experts_T = np.full((length, *known.shape[1:]), ROUTE_NATIVELY, np.int16)
    if len(experts[k]) > length:
        raise ValueError(f"rollout_expert_indices[{k}] has {len(experts[k])} tokens; the entry has {length}")
    if len(experts[k]):
        experts_T[: len(experts[k])] = experts[k]
    return experts_T
