"""Whole groups into one mini-batch: merge, score, mask what is stale, pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from service.config.tree import Config
from service.handoff.branches import Drift, Mode
from service.handoff.merge import merge
from service.handoff.pack import Layout, LossColumns, Placement, micro_batches, place
from service.handoff.score import ReturnRule, advantages, returns
from service.handoff.tables import concat_ends, concat_steps, select_ends, trajectories
from service.handoff.versions import VersionHistory
from service.types import Bools, Ends, Float64s, Int32s, MiniBatch, Row, Rows, Steps


class CompleteGroup(NamedTuple):
    """A group whose trajectories have all ended: their winning attempts, steps and ends in any order."""

    ordinal: int
    prompt_uid: str
    steps: Steps
    ends: Ends


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a mini-batch is made."""

    ranks: int
    token_budget: int
    """Tokens of one micro-batch, at most."""
    estimator: str = "grpo"
    returns: ReturnRule = "last"
    mode: Mode = "linear"
    drift: Drift = "fork"
    max_drift_tokens: int = 16
    max_staleness: int | None = None
    """Versions after which a token carries no loss; None: no bound."""
    layout: Layout = "packed"

    @staticmethod
    def of(config: Config) -> BatchSettings:
        """The settings that a configuration implies."""
        return BatchSettings(
            ranks=config.trainer.ranks,
            token_budget=config.trainer.max_tokens_per_micro_batch,
            estimator=config.algorithm.estimator,
            returns=config.algorithm.returns,
            mode=config.buffer.merge,
            drift=config.buffer.drift,
            max_drift_tokens=config.buffer.max_drift_tokens,
            max_staleness=config.buffer.max_staleness,
            layout=config.trainer.layout,
        )


def mini_batch_boundaries(rows: Sequence[Row], mini_batch_size: int) -> list[tuple[int, int]]:
    """The rows of each mini-batch of `mini_batch_size` whole prompts, as (start, stop).

    Rows of prompts  a a b c c d  in mini-batches of 2:  [(0, 3), (3, 6)]
    """
    if mini_batch_size < 1:
        raise ValueError(f"mini_batch_size must be at least 1, not {mini_batch_size}")
    starts: list[int] = []
    seen: set[str] = set()
    for r, row in enumerate(rows):
        if r and row.prompt_uid == rows[r - 1].prompt_uid:
            continue
        if row.prompt_uid in seen:
            raise ValueError(f"rows of prompt {row.prompt_uid!r} do not stand together: again at row {r}")
        seen.add(row.prompt_uid)
        starts.append(r)
    if len(starts) % mini_batch_size:
        raise ValueError(f"{len(starts)} prompts do not divide into mini-batches of {mini_batch_size}")
    bounds = [*starts[::mini_batch_size], len(rows)] if starts else []
    return list(pairwise(bounds))


def form_mini_batch(
    lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings
) -> MiniBatch:
    """The mini-batch of these groups, in their order, as the trainer's current version would train it."""
    steps = concat_steps([group.steps for group in groups])
    ends, prompt_G = _ends_in_order(groups)
    merged = merge(steps, settings.mode, settings.drift, settings.max_drift_tokens)
    rows = merged.rows
    trajectory_R = _trajectory_of_rows(rows, ends)
    return_G = returns(steps, ends, settings.returns)
    staleness_N = history.staleness(rows.versions_N, history.current)
    usable_N = rows.loss_mask_N & np.isfinite(rows.logprobs_N)
    loss_mask_N = usable_N if settings.max_staleness is None else usable_N & (staleness_N <= settings.max_staleness)
    columns = LossColumns(
        loss_mask_N=loss_mask_N,
        logprobs_N=np.where(loss_mask_N, rows.logprobs_N, np.float32(0)),
        staleness_N=staleness_N,
        trajectory_R=trajectory_R,
    )
    length_R = np.diff(rows.offsets_R)
    placement = place(length_R, trajectory_R, settings.ranks, settings.token_budget, settings.layout)
    facts = _merge_facts(merged.counts, steps) | _length_facts(length_R, placement)
    facts |= _token_facts(rows, steps, usable_N, columns, len(ends)) | _reward_facts(return_G, prompt_G)
    return MiniBatch(
        lease=lease,
        groups=tuple(group.ordinal for group in groups),
        advantage_G=advantages(settings.estimator, return_G, prompt_G).astype(np.float32),
        return_G=return_G,
        loss_tokens_G=_per_trajectory(loss_mask_N, rows, trajectory_R, len(ends)).astype(np.int64),
        rows_G=np.bincount(trajectory_R, minlength=len(ends)).astype(np.int32),
        prompt_of_trajectory_G=prompt_G,
        ranks=micro_batches(rows, columns, placement),
        facts=facts,
    )


def zero_variance(group: CompleteGroup, rule: ReturnRule) -> bool:
    """Whether all trajectories of a group have the same return, so that nothing tells them apart."""
    return_G = returns(group.steps, group.ends, rule)
    return bool((return_G == return_G[:1]).all())


def batch_of_rank(batch: MiniBatch, rank: int) -> MiniBatch:
    """The same mini-batch with the micro-batches of one rank only."""
    return replace(batch, ranks=(batch.ranks[rank],))


def _ends_in_order(groups: Sequence[CompleteGroup]) -> tuple[Ends, Int32s]:
    """The trajectories in the order of groups, then samples; and each one's group."""
    ends = concat_ends([group.ends for group in groups])
    prompt_G = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.ends) for group in groups])
    order = np.lexsort((ends.sample_E, prompt_G))
    return select_ends(ends, order), prompt_G[order]


def _trajectory_of_rows(rows: Rows, ends: Ends) -> Int32s:
    number_X, first_X = trajectories(
        np.concatenate((ends.ordinal_E, rows.ordinal_R)),
        np.concatenate((ends.sample_E, rows.sample_R)),
        np.concatenate((ends.attempt_E, rows.attempt_R)),
    )
    if len(first_X) != len(ends):
        raise ValueError("a row belongs to a trajectory that has no end, or a trajectory ends twice")
    return number_X[len(ends) :].astype(np.int32)


def _per_trajectory(mask_N: Bools, rows: Rows, trajectory_R: Int32s, count: int) -> Float64s:
    """Tokens under the mask, by trajectory."""
    before_N = np.concatenate(([0], np.cumsum(mask_N)))
    tokens_R = np.diff(before_N[rows.offsets_R])
    return np.asarray(np.bincount(trajectory_R, tokens_R, minlength=count), np.float64)


def _merge_facts(counts: dict[str, int], steps: Steps) -> dict[str, float]:
    return {
        "generate/num_seq_before_merge": counts["steps"],
        "generate/num_seq_after_merge": counts["rows"],
        "generate/batch_num_seq": counts["rows"],
        "generate/merge_ratio": counts["steps"] / max(counts["rows"], 1),
        "generate/tokens_before_merge": counts["tokens_before"],
        "generate/tokens_after_merge": counts["tokens_after"],
        "generate/prefix_mismatches": counts["forked"] + counts["realigned"] + counts["reset"],
        **{f"generate/steps_{outcome}": counts[outcome] for outcome in ("extended", "forked", "realigned", "reset")},
        "generate/realigned_tokens": counts["realigned_tokens"],
    }


def _length_facts(length_R: np.typing.NDArray[np.int64], placement: Placement) -> dict[str, float]:
    longest = int(length_R.max(initial=0))
    total = int(length_R.sum())
    return {
        "generate/batch_padded_seq_len": longest,
        "generate/batch_longest_row": longest,
        "generate/batch_padding_ratio": 1 - total / (longest * len(length_R)) if total else 0.0,
        "generate/batch_num_tokens": total,
        "generate/batch_imbalance": placement.imbalance,
        "generate/batch_num_micro_batches": sum(len(rank) for rank in placement.ranks),
        "generate/batch_num_dummies": sum(not rows for rank in placement.ranks for rows in rank),
    }


def _token_facts(rows: Rows, steps: Steps, usable_N: Bools, columns: LossColumns, count: int) -> dict[str, float]:
    """Tokens by what becomes of them; stale ones also by the length of their trajectory (quarter 4: the longest)."""
    sampled = int(np.count_nonzero(steps.loss_mask_N))
    stale_G = _per_trajectory(usable_N & ~columns.loss_mask_N, rows, columns.trajectory_R, count)
    sampled_G = _per_trajectory(rows.loss_mask_N, rows, columns.trajectory_R, count)
    response_G = np.bincount(
        columns.trajectory_R, np.diff(rows.offsets_R) - rows.prompt_length_R, minlength=count
    )  # fmt: skip
    age_N = columns.staleness_N[rows.loss_mask_N]
    by_length = np.array_split(stale_G[np.argsort(sampled_G, kind="stable")], 4)
    loss = int(np.count_nonzero(columns.loss_mask_N))
    return {
        "generate/avg_num_tokens": float(response_G.mean()) if count else 0.0,
        "generate/avg_assistant_tokens": float(sampled_G.mean()) if count else 0.0,
        "generate/avg_num_turns": len(steps) / count if count else 0.0,
        "async/staleness_mean": float(age_N.mean()) if len(age_N) else 0.0,
        "async/staleness_max": float(age_N.max(initial=0)),
        "async/stale_tokens": float(stale_G.sum()),
        **{f"async/stale_tokens_quarter_{q + 1}": float(part.sum()) for q, part in enumerate(by_length)},
        "tokens/sampled": sampled,
        "tokens/loss": loss,
        "tokens/stale": float(stale_G.sum()),
        "tokens/masked": sampled - loss - float(stale_G.sum()),
    }


def _reward_facts(return_G: Float64s, prompt_G: Int32s) -> dict[str, float]:
    if not len(return_G):
        return {}
    passed_P = np.bincount(prompt_G, return_G > 0) > 0
    samples = round(len(return_G) / len(passed_P))
    return {
        "reward/avg_raw_reward": float(return_G.mean()),
        "reward/mean_positive_reward": float(np.maximum(return_G, 0).mean()),
        f"reward/avg_pass_at_{samples}": float(passed_P.mean()),
    }
