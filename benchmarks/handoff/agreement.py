"""Checks that Baton and SkyRL give the same results for random episodes with forks, resets and empty observations."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from baton.examples.skyrl_steps import steps_from_generator_output
from benchmarks.handoff import peers
from benchmarks.handoff.peers import TrajectoryID, ppo_utils
from service.handoff.batches.estimators import advantages
from service.handoff.prefixes.merge import merge_steps

TOLERANCE = 1e-5
LISTS = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")


def check(rounds: int = 300) -> int:
    """Raise AssertionError on the first difference; returns how many comparisons were made."""
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        output = random_output(rng)
        check_merge(output)
        check_scores(rng)
    return rounds


def random_output(rng: np.random.Generator) -> dict[str, Any]:
    """Random output in SkyRL's form: up to four prompts, with up to three samples of up to five steps each."""
    entries = [
        entry
        for prompt in range(int(rng.integers(1, 5)))
        for sample in range(int(rng.integers(1, 4)))
        for entry in _trajectory(rng, TrajectoryID(f"p{prompt}", sample))
    ]
    names = (*LISTS, "stop_reasons", "trajectory_ids", "is_last_step")
    columns = {name: [entry[name] for entry in entries] for name in names}
    return columns | {"rollout_expert_indices": None, "rollout_metrics": None}


def _trajectory(rng: np.random.Generator, identity: TrajectoryID) -> list[dict[str, Any]]:
    history, entries = rng.integers(0, 9, rng.integers(1, 6)).tolist(), []
    turns = int(rng.integers(1, 6))
    for turn in range(turns):
        response = rng.integers(0, 9, rng.integers(1, 5)).tolist()
        entries.append(
            {
                "prompt_token_ids": list(history),
                "response_ids": response,
                "loss_masks": rng.integers(0, 2, len(response)).tolist(),
                "rollout_logprobs": (-rng.random(len(response))).tolist(),
                "rewards": float(rng.random()),
                "stop_reasons": str(rng.choice(["stop", "length"])),
                "trajectory_ids": identity,
                "is_last_step": turn == turns - 1,
            }
        )
        history = history + response + rng.integers(0, 9, rng.integers(0, 4)).tolist()
        if rng.random() < 0.3:
            history[int(rng.integers(len(history)))] = int(rng.integers(0, 9))
        if rng.random() < 0.1:
            history = history[: int(rng.integers(1, len(history) + 1))]
    return entries


def check_merge(output: dict[str, Any]) -> None:
    """Check that both merge the output to the same rows."""
    rows = merge_steps(steps_from_generator_output(output))
    theirs = peers.merge(output)
    for r, row in enumerate(rows):
        ours = (row.prompt_ids, row.response_ids, row.loss_mask, row.logprobs, row.reward)
        for name, mine in zip(LISTS, ours, strict=True):
            np.testing.assert_allclose(mine, theirs[name][r], atol=TOLERANCE, err_msg=f"{name}[{r}]")
    assert [row.stop_reason for row in rows] == theirs["stop_reasons"]
    identities = [(t.instance_id, t.repetition_id) for t in theirs["trajectory_ids"]]
    assert [(row.prompt_uid, row.trajectory.sample) for row in rows] == identities


def check_scores(rng: np.random.Generator) -> None:
    """Check that the estimators that both have give the same advantages."""
    returns_G = rng.integers(0, 3, 12).astype(np.float64)
    uids = rng.integers(0, 4, 12)
    rewards, mask = torch.tensor(returns_G, dtype=torch.float32)[:, None], torch.ones(12, 1)
    peer: dict[str, Any] = {
        "grpo": ppo_utils.compute_grpo_outcome_advantage,
        "rloo": ppo_utils.compute_rloo_outcome_advantage,
        "maxrl": ppo_utils.compute_maxrl_advantage,
    }
    for name, function in peer.items():
        theirs = function(token_level_rewards=rewards.clone(), response_mask=mask, index=uids)[0][:, 0].numpy()
        _compare(name, returns_G, uids, theirs)
    theirs = peer["grpo"](token_level_rewards=rewards.clone(), response_mask=mask, index=uids, grpo_norm_by_std=False)
    _compare("grpo_no_std", returns_G, uids, theirs[0][:, 0].numpy())


def _compare(name: str, returns_G: Any, uids: Any, theirs: Any) -> None:
    ours = cast(Any, advantages(name, returns_G, uids))
    scale = np.maximum(1, np.abs(theirs))  # MaxRL divides by a mean of 0 + 1e-6
    np.testing.assert_allclose(ours / scale, theirs / scale, atol=TOLERANCE, err_msg=name)
