"""Metrics of an optimizer step: sums and maxima are collected on the device, and the host computes means and ratios
from them."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from service.learn.losses.policy_losses import safe_exp

STALENESS_EDGES = (1, 2, 3, 5, 9)
STALENESS_BINS = ("0", "1", "2", "3_4", "5_8", "9_up")
BY_STALENESS = ("tokens", "ratio", "square", "kl", "clipped", "differing")


class Sums:
    """Named sums and maxima over all micro-batches of all ranks. Every rank must use the same names."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a value to the sum `name`. The entries of a vector are summed separately, as `name/0`, `name/1`, ..."""
        value = value.detach().to(torch.float64).reshape(-1)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def max(self, name: str, value_M: Tensor) -> None:
        """Raise the maximum `name` to the largest of these values. A maximum begins at -inf; without values it does not
        change."""
        floor = torch.full((1,), -torch.inf, dtype=torch.float64, device=self._device)
        value = torch.cat([floor, value_M.detach().to(torch.float64)]).amax(0, keepdim=True)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def totals(self) -> dict[str, float]:
        """All sums and maxima over all ranks, equal on every rank; needs one collective, and waits for the device
        once."""
        mine = torch.cat([*self._sums.values(), *self._maxima.values()])
        parts = [mine]
        if self._world_size > 1:
            parts = [torch.empty_like(mine) for _ in range(self._world_size)]
            dist.all_gather(parts, mine)
        ranks, n_sums = torch.stack(parts), len(mine) - len(self._maxima)
        totals = torch.cat([ranks[:, :n_sums].sum(0), ranks[:, n_sums:].amax(0)])
        return dict(zip(self._names(), totals.tolist(), strict=True))

    def _names(self) -> list[str]:
        names = []
        for name, value in self._sums.items():
            names += [name] if len(value) == 1 else [f"{name}/{i}" for i in range(len(value))]
        return [*names, *self._maxima]


def rounding(dtype: str, device: torch.device) -> float:
    """Nats by which two log-probabilities of a token may differ under the same weights of this type."""
    return 0.1 if dtype == "bfloat16" else 0.01 if device.type == "cuda" else 0.001


class RatioMetrics:
    """Metrics of the importance ratios (trained policy / rollout policy), over all tokens and by staleness."""

    def __init__(self, device: torch.device, tolerance: float) -> None:
        """`tolerance`: largest absolute log-ratio, in nats, with which engine and trainer count as agreeing about a
        token."""
        self._tolerance = tolerance
        # allocated once, because copying constants to the device waits for the device
        self._edges = torch.tensor(STALENESS_EDGES, device=device)

    def add(self, sums: Sums, log_ratio_M: Tensor, clipped_M: Tensor, staleness_M: Tensor) -> None:
        """Add the values of a micro-batch's loss tokens to `sums`, by range of staleness: number of tokens, sums of
        ratios, squared ratios and KL estimates, the largest ratio, clipped tokens, and tokens beyond the tolerance."""
        ratio_M = safe_exp(log_ratio_M)
        sums.max("ratio_max", ratio_M)
        kl_M = ratio_M - 1 - log_ratio_M
        # "not within", so that NaN counts as differing
        differing_M = ~(log_ratio_M.abs() <= self._tolerance)
        clipped_M, differing_M = (flag_M.to(ratio_M.dtype) for flag_M in (clipped_M, differing_M))
        ones_M = torch.ones_like(ratio_M)
        measured = torch.stack([ones_M, ratio_M, ratio_M.square(), kl_M, clipped_M, differing_M]).double()
        bin_M = torch.bucketize(staleness_M, self._edges, right=True)
        by_bin = measured.new_zeros(len(measured), len(STALENESS_BINS)).index_add(1, bin_M, measured)
        for name, bins in zip(BY_STALENESS, by_bin, strict=True):
            sums.add(name, bins)
        largest = torch.full_like(by_bin[0], -torch.inf).scatter_reduce(0, bin_M, ratio_M.double(), "amax")
        for i in range(len(STALENESS_BINS)):
            sums.max(f"largest/{i}", largest[i : i + 1])


def step_metrics(totals: dict[str, float], n_loss_tokens: int) -> dict[str, float]:
    """The step's metrics by name, computed from `totals`. Means and standard deviations (of the population) are over
    the tokens that carry loss."""
    n = n_loss_tokens

    def over_bins(name: str) -> float:
        return sum(totals[f"{name}/{i}"] for i in range(len(STALENESS_BINS)))

    metrics = {
        "policy/policy_loss": totals["loss"],
        "policy/policy_entropy": totals["entropy"] / n,
        "policy/policy_kl": over_bins("kl") / n,
        **_ratio_metrics("policy", over_bins("ratio") / n, over_bins("square") / n, totals["ratio_max"]),
        "policy/loss_metrics/clip_ratio": over_bins("clipped") / n,
        "policy/loss_metrics/masked_ratio": totals["masked"] / n,
        "policy/loss_metrics/truncated_ratio": totals["truncated"] / n,
        "policy/grad_norm": _root(totals["grad_square"]),
    }
    if "teacher_tokens" in totals:
        metrics["policy/teacher_kl"] = totals["teacher_kl"] / max(totals["teacher_tokens"], 1)
        metrics["policy/teacher_token_ratio"] = totals["teacher_tokens"] / n
    if "kl_reference" in totals:
        metrics["policy/reference_kl"] = totals["kl_reference"] / n
    for i, name in enumerate(STALENESS_BINS):
        if tokens := totals[f"tokens/{i}"]:
            key = f"policy/by_staleness/{name}"
            mean, square = totals[f"ratio/{i}"] / tokens, totals[f"square/{i}"] / tokens
            metrics[f"{key}/tokens"] = tokens
            metrics |= _ratio_metrics(key, mean, square, totals[f"largest/{i}"])
            metrics[f"{key}/kl"] = totals[f"kl/{i}"] / tokens
            metrics[f"{key}/clip_ratio"] = totals[f"clipped/{i}"] / tokens
            metrics[f"{key}/differing_fraction"] = totals[f"differing/{i}"] / tokens
    return metrics


def _ratio_metrics(key: str, mean: float, square: float, largest: float) -> dict[str, float]:
    """Metrics of importance ratios with this mean, mean square and maximum."""
    return {
        f"{key}/is_ratio_mean": mean,
        f"{key}/is_ratio_std": _root(square - mean * mean),
        f"{key}/is_ratio_max": largest,
        f"{key}/effective_sample_fraction": mean * mean / square if square > 0 else 0.0,
    }


def not_finite(metrics: dict[str, float]) -> str | None:
    """If a metric is not finite, a text that names it, because the optimizer step must then be skipped. None if all
    metrics are finite.

    An infinite log-probability of the rollout shows only in `policy_kl`, because clamping hides it from the loss.
    """
    for name in ("policy/policy_loss", "policy/grad_norm", "policy/policy_kl"):
        if not math.isfinite(metrics[name]):
            return f"{name} is {metrics[name]}"
    return None


def _root(square: float) -> float:
    """Square root; 0 for a variance that is negative by rounding, NaN for NaN."""
    return math.sqrt(square) if not square < 0 else 0.0
