"""Reductions of the loss: compute the weight of each loss token before the backward pass.

The loss of a mini-batch is `sum over tokens of weight * term`. The weights come from counts over the whole mini-batch
on all ranks, so the loss does not depend on how a trajectory was cut into rows, packed or sharded:

| reduction | weight of a loss token of trajectory g |
|---|---|
| token_mean | 1 / loss tokens of the mini-batch |
| trajectory_mean | 1 / (trajectories * loss tokens of g) |
| prompt_mean | 1 / (prompts * loss tokens of g's prompt) |
| seq_mean_token_sum_norm | 1 / (trajectories * constant) |

A trajectory (or prompt) without loss tokens counts in these denominators, and contributes 0 to the mean.

Sources: token_mean: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3; trajectory_mean (a mean over outputs, each
divided by its length): Shao et al. 2024 (GRPO), arXiv:2402.03300; a constant norm: Liu et al. 2025 (Dr. GRPO),
arXiv:2503.20783.
"""

from __future__ import annotations

import numpy as np

from service.types import Float64s, MiniBatch


def trajectory_weights(batch: MiniBatch, reduction: str, norm_tokens: int) -> Float64s:
    """[G] for each trajectory, the weight of each of its loss tokens."""
    tokens_G = batch.loss_tokens_G.astype(np.float64)
    n_trajectories = len(tokens_G)
    match reduction:
        case "token_mean":
            return _inverse(np.full(n_trajectories, tokens_G.sum(), dtype=np.float64))
        case "trajectory_mean":
            return _inverse(tokens_G * n_trajectories)
        case "prompt_mean":
            prompts = len(batch.groups)
            tokens_P = np.bincount(batch.prompt_of_trajectory_G, weights=tokens_G, minlength=prompts)
            return _inverse(prompts * tokens_P.astype(np.float64)[batch.prompt_of_trajectory_G])
        case "seq_mean_token_sum_norm":
            return np.full(n_trajectories, 1.0 / (n_trajectories * norm_tokens))
        case _:
            raise ValueError(f"unknown reduction {reduction!r}")


def _inverse(denominator: Float64s) -> Float64s:
    """1 / denominator; 0 if the denominator is 0, because then there is no loss token."""
    return np.divide(1.0, denominator, out=np.zeros_like(denominator), where=denominator > 0)
