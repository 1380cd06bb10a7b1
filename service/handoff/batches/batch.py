"""Forming a mini-batch of whole groups: merge, score, mask stale tokens, pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from service.columns import concat, lengths_of, select, trajectories
from service.handoff.batches.batch_metrics import (
    length_metrics,
    merge_metrics,
    reward_metrics,
    staleness_metrics,
    token_metrics,
    turn_metrics,
)
from service.handoff.batches.pack import Layout, in_packing_order, micro_batches, place
from service.handoff.batches.score import ReturnRule, advantages, returns
from service.handoff.ledger.versions import VersionHistory
from service.handoff.prefixes.branches import Drift, Mode
from service.handoff.prefixes.merge import check_choice, merge
from service.handoff.steps.tables import concat_steps, name_of
from service.types import NO_VERSION, Ends, Int32s, Int64s, MiniBatch, PolicyVersion, Row, Rows, Steps

if TYPE_CHECKING:  # so that the library needs neither pydantic nor YAML
    from service.config.tree import Config


class CompleteGroup(NamedTuple):
    """A group whose trajectories have all ended: the steps and ends of their final attempts, in any order."""

    group_id: int
    prompt_uid: str
    steps: Steps
    ends: Ends


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a mini-batch is made."""

    ranks: int
    token_budget: int
    """Tokens of one micro-batch, at most; a longer row makes a micro-batch of its own."""
    estimator: str = "grpo"
    returns: ReturnRule = "last"
    mode: Mode = "linear"
    drift: Drift = "fork"
    max_drift_tokens: int = 16
    max_staleness: int | None = None
    """Versions after which a token carries no loss; None: no bound."""
    layout: Layout = "packed"

    def __post_init__(self) -> None:
        choices = (("returns", ReturnRule), ("mode", Mode), ("drift", Drift), ("layout", Layout))
        for name, known in choices:
            check_choice(name, getattr(self, name), known)
        for name in ("ranks", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: there must be at least 1")

    @staticmethod
    def of(config: Config) -> BatchSettings:
        """The settings that a configuration implies."""
        return BatchSettings(
            ranks=config.trainer.ranks,
            token_budget=config.trainer.max_tokens_per_micro_batch,
            estimator=config.algorithm.estimator,
            returns=config.algorithm.returns,
            mode=config.merge_mode,
            drift=config.buffer.drift,
            max_drift_tokens=config.buffer.max_drift_tokens,
            max_staleness=config.buffer.max_staleness,
            layout=config.trainer.layout,
        )


def mini_batch_boundaries(rows: Sequence[Row], mini_batch_size: int) -> list[tuple[int, int]]:
    """The rows of each mini-batch of `mini_batch_size` whole prompts, as (start, stop).

    >>> from types import SimpleNamespace
    >>> rows = [SimpleNamespace(prompt_uid=uid) for uid in "aabccd"]
    >>> mini_batch_boundaries(rows, 2)
    [(0, 3), (3, 6)]
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
    """The mini-batch of these groups, in their order, for a trainer at the history's newest version.

    Raises:
        ValueError: no groups; a sampled token without log-probability, or of a version that is not published yet;
            a step whose trajectory has no end.
    """
    if not groups:
        raise ValueError("a mini-batch of no groups")
    steps = concat_steps([group.steps for group in groups])
    ends, prompt_G = _ends_in_order(groups)
    _refuse_untrainable(steps, history.current)
    merged = merge(steps, settings.mode, settings.drift, settings.max_drift_tokens)
    length_R, trajectory_R = lengths_of(merged.rows.offsets_R), _trajectory_of_rows(merged.rows, ends)
    placement = place(length_R, trajectory_R, settings.ranks, settings.token_budget, settings.layout)
    packed, order_R = in_packing_order(merged.rows, placement)
    trajectory_R = trajectory_R[order_R]
    sampled_G = _per_trajectory(packed, trajectory_R, len(ends))
    staleness_N, stale_G = _masked(packed, trajectory_R, len(ends), history, settings.max_staleness)
    loss_tokens_G = _per_trajectory(packed, trajectory_R, len(ends))
    return_G = returns(steps, ends, settings.returns)
    metrics = (
        merge_metrics(merged.counts)
        | length_metrics(length_R, placement)
        | reward_metrics(return_G, prompt_G)
        | turn_metrics(packed, steps, len(ends))
        | staleness_metrics(staleness_N, sampled_G, stale_G)
        | token_metrics(steps, loss_tokens_G, stale_G)
    )
    return MiniBatch(
        lease=lease,
        groups=tuple(group.group_id for group in groups),
        advantage_G=advantages(settings.estimator, return_G, prompt_G).astype(np.float32),
        return_G=return_G,
        loss_tokens_G=loss_tokens_G,
        rows_G=np.bincount(trajectory_R, minlength=len(ends)).astype(np.int32),
        prompt_of_trajectory_G=prompt_G,
        ranks=micro_batches(packed, staleness_N, trajectory_R, placement),
        metrics=metrics,
    )


def _refuse_untrainable(steps: Steps, current: PolicyVersion) -> None:
    """ValueError on sampled tokens without an importance ratio or a staleness."""
    if not steps.has_logprobs_K.all():
        lacking_N = steps.loss_mask_N & ~np.repeat(steps.has_logprobs_K, lengths_of(steps.offsets_K))
        if lacking_N.any():
            k = int(np.searchsorted(steps.offsets_K, lacking_N.argmax(), "right")) - 1
            raise ValueError(f"{name_of(steps, k)} has tokens to train, but logprobs=None: no ratio can be taken")
    if (newest := int(steps.versions_N.max(initial=NO_VERSION))) > current.pack():
        k = int(np.searchsorted(steps.offsets_K, steps.versions_N.argmax(), "right")) - 1
        raise ValueError(
            f"{name_of(steps, k)} was sampled at version {PolicyVersion.unpack(newest)}, but the newest of the history "
            f"is {current}; publish it there first"
        )


def batch_of_rank(batch: MiniBatch, rank: int) -> MiniBatch:
    """The same mini-batch with the micro-batches of one rank only."""
    return replace(batch, ranks=(batch.ranks[rank],))


def _ends_in_order(groups: Sequence[CompleteGroup]) -> tuple[Ends, Int32s]:
    """The trajectories in the order of groups, then samples; and each one's group."""
    ends = concat([group.ends for group in groups])
    prompt_G = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.ends) for group in groups])
    order = np.lexsort((ends.sample_E, prompt_G))
    return select(ends, order), prompt_G[order]


def _trajectory_of_rows(rows: Rows, ends: Ends) -> Int32s:
    number_X, first_X = trajectories(
        np.concatenate((ends.group_id_E, rows.group_id_R)),
        np.concatenate((ends.sample_E, rows.sample_R)),
        np.concatenate((ends.attempt_E, rows.attempt_R)),
    )
    if len(first_X) != len(ends):
        raise ValueError("a row belongs to a trajectory that has no end, or a trajectory ends twice")
    return number_X[len(ends) :].astype(np.int32)


def _masked(
    packed: Rows, trajectory_R: Int32s, count: int, history: VersionHistory, max_staleness: int | None
) -> tuple[Int32s, Int64s]:
    """Mask tokens without a finite log-probability and stale tokens, in place.

    Returns the staleness of every token, and the number of stale tokens of each trajectory.
    """
    staleness_N, mask_N = history.staleness(packed.versions_N, history.current), packed.loss_mask_N
    finite_N = np.isfinite(packed.logprobs_N)
    if not finite_N.all():
        np.logical_and(mask_N, finite_N, out=mask_N)
    stale_G = np.zeros(count, np.int64)
    if max_staleness is not None and staleness_N.max(initial=0) > max_staleness:
        before_G = _per_trajectory(packed, trajectory_R, count)
        np.logical_and(mask_N, staleness_N <= max_staleness, out=mask_N)
        stale_G = before_G - _per_trajectory(packed, trajectory_R, count)
    np.copyto(packed.logprobs_N, 0, where=~mask_N)
    return staleness_N, stale_G


def _per_trajectory(rows: Rows, trajectory_R: Int32s, count: int) -> Int64s:
    """Tokens that carry loss, by trajectory."""
    bounds = rows.offsets_R.tolist()
    tokens_R = [np.count_nonzero(rows.loss_mask_N[start:stop]) for start, stop in pairwise(bounds)]
    return np.bincount(trajectory_R, tokens_R, minlength=count).astype(np.int64)
