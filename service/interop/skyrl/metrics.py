"""The `rollout_metrics` that SkyRL puts into an output which it merges or joins, under SkyRL's names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_SAMPLED = re.compile(rb"\x01\x01*")
"""A run of ones. Five times as fast as the pattern of one part, because the search leaps to the first byte."""


def rollout_metrics(lengths: Sequence[int], rewards: Sequence[Any], masks: Sequence[bytearray]) -> dict[str, float]:
    """Statistics of tokens over rows.

    Args:
        lengths: [R] tokens of each response.
        rewards: [R] numbers, or lists of one number a token.
        masks: [R] loss mask of each response, a byte a token.
    """
    tokens_R = np.array(lengths)
    reward_R = np.array([float(np.sum(reward)) if isinstance(reward, list) else float(reward) for reward in rewards])
    sampled_R = np.array([mask.count(1) for mask in masks])
    turn_tokens = [len(run) for mask in masks for run in _SAMPLED.findall(mask)]
    metrics = {f"generate/{name}_num_tokens": value for name, value in _spread(tokens_R).items()}
    metrics["generate/avg_tokens_non_zero_rewards"] = _mean(tokens_R[reward_R > 0])
    metrics["generate/avg_tokens_zero_rewards"] = _mean(tokens_R[reward_R == 0])
    metrics |= {f"generate/{name}_assistant_tokens": value for name, value in _spread(sampled_R).items()}
    if turn_tokens:
        turns = np.array(turn_tokens)
        metrics["generate/tokens_per_turn_mean"] = turns.mean().item()
        metrics["generate/tokens_per_turn_std"] = turns.std().item()
        metrics["generate/tokens_per_turn_max"] = turns.max().item()
    return metrics


def _spread(values: Any) -> dict[str, float]:
    return {
        "min": values.min().item(),
        "max": values.max().item(),
        "avg": values.mean().item(),
        "std": values.std().item(),
    }


def _mean(values: Any) -> float:
    return float(values.mean()) if values.size else 0.0
