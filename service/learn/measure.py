"""What a step reports: sums on the device first, means and ratios of them at the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from service.learn.losses.loss import safe_exp
from service.learn.sums import Sums

STALENESS_EDGES = (1, 2, 3, 5, 9)
STALENESS_BINS = ("0", "1", "2", "3_4", "5_8", "9_up")


class Measure:
    """Collects how far the trained policy is from the one that sampled."""

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.tensor(STALENESS_EDGES, device=device)

    def ratios(self, sums: Sums, log_ratio_M: Tensor, clipped_M: Tensor, staleness_M: Tensor) -> None:
        """Importance ratios, their divergence and the clipped tokens, in all and by staleness."""
        ratio_M = safe_exp(log_ratio_M)
        sums.max("ratio_max", ratio_M)
        kl_M = ratio_M - 1 - log_ratio_M
        clipped_M = clipped_M.to(ratio_M.dtype)
        measured = torch.stack([torch.ones_like(ratio_M), ratio_M, ratio_M.square(), kl_M, clipped_M]).double()
        bin_M = torch.bucketize(staleness_M, self._edges, right=True)
        by_bin = measured.new_zeros(len(measured), len(STALENESS_BINS)).index_add(1, bin_M, measured)
        for name, bins in zip(("tokens", "ratio", "square", "kl", "clipped"), by_bin, strict=True):
            sums.add(name, bins)
        largest = torch.full_like(by_bin[0], -torch.inf).scatter_reduce(0, bin_M, ratio_M.double(), "amax")
        for i in range(len(STALENESS_BINS)):
            sums.max(f"largest/{i}", largest[i : i + 1])


def step_metrics(totals: dict[str, float], n_trajectory_tokens: int) -> dict[str, float]:
    """The step's metrics; means and standard deviations (of the population) are over the tokens that carry loss."""
    n = n_trajectory_tokens

    def whole(name: str) -> float:
        return sum(totals[f"{name}/{i}"] for i in range(len(STALENESS_BINS)))

    mean, square = whole("ratio") / n, whole("square") / n
    metrics = {
        "policy/policy_loss": totals["loss"],
        "policy/policy_entropy": totals["entropy"] / n,
        "policy/policy_kl": whole("kl") / n,
        "policy/is_ratio_mean": mean,
        **_spread("policy", mean, square, totals["ratio_max"]),
        "policy/loss_metrics/clip_ratio": whole("clipped") / n,
        "policy/loss_metrics/masked_ratio": totals["masked"] / n,
        "policy/loss_metrics/truncated_ratio": totals["truncated"] / n,
        "policy/grad_norm": _root(totals["grad_square"]),
    }
    if "kl_reference" in totals:
        metrics["policy/reference_kl"] = totals["kl_reference"] / n
    return metrics | _by_staleness(totals)


def _by_staleness(totals: dict[str, float]) -> dict[str, float]:
    metrics = {}
    for i, name in enumerate(STALENESS_BINS):
        tokens = totals[f"tokens/{i}"]
        if tokens:
            key = f"policy/by_staleness/{name}"
            metrics[f"{key}/tokens"] = tokens
            mean = totals[f"ratio/{i}"] / tokens
            metrics[f"{key}/is_ratio_mean"] = mean
            metrics |= _spread(key, mean, totals[f"square/{i}"] / tokens, totals[f"largest/{i}"])
            metrics[f"{key}/kl"] = totals[f"kl/{i}"] / tokens
            metrics[f"{key}/clip_ratio"] = totals[f"clipped/{i}"] / tokens
    return metrics


def _spread(key: str, mean: float, square: float, largest: float) -> dict[str, float]:
    """How importance ratios of this mean and mean square are spread."""
    return {
        f"{key}/is_ratio_std": _root(square - mean * mean),
        f"{key}/is_ratio_max": largest,
        f"{key}/effective_sample_fraction": mean * mean / square if square > 0 else 0.0,
    }


def not_finite(metrics: dict[str, float]) -> str | None:
    """Why no optimizer step may be taken; None when it may.

    The divergence tells of a rollout log-probability that is infinite, which clamping keeps out of loss and gradient.
    """
    for name in ("policy/policy_loss", "policy/grad_norm", "policy/policy_kl"):
        if not math.isfinite(metrics[name]):
            return f"{name} is {metrics[name]}"
    return None


def _root(square: float) -> float:
    """Square root; rounding may leave a variance a hair below 0, and NaN stays NaN."""
    return math.sqrt(square) if not square < 0 else 0.0
