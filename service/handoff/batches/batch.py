"""Forming a mini-batch of whole groups: merge, score, mask stale tokens, pack, measure.

`generate/batch_padded_seq_len` is the padded length: the length of every row if all rows lay in one rectangle.

    rows of 6, 5 and 3 tokens   ->   padded length 6, 14 tokens, padding ratio 1 - 14 / (3 * 6)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from service.columns import concat, lengths_of, select
from service.handoff.batches.advantages import Rule, advantages_of
from service.handoff.batches.credit import Credit
from service.handoff.batches.pack import Layout, Placement, in_packing_order, micro_batches, place
from service.handoff.batches.score import ReturnRule, group_stats, returns
from service.handoff.batches.share import placed
from service.handoff.batches.untrained import without_untrained
from service.handoff.ledger.events import GroupStats
from service.handoff.ledger.lifecycle import Fate
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.versions import VersionHistory, version_of
from service.handoff.prefixes.merge import Mode, check_choice, merge
from service.handoff.steps.roles import TRAINED, Role
from service.handoff.steps.tables import by_turn, concat_steps, end_of_items, is_truncated_K, name_of
from service.types import NO_VERSION, Ends, Int32s, Int64s, MicroBatch, MiniBatch, Row, Rows, Steps


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How a mini-batch is made."""

    ranks: int
    """Parts of the mini-batch: one a rank, or one a group of ranks with sequence parallelism."""
    token_budget: int
    """Tokens of one micro-batch, at most; a longer row makes a micro-batch of its own."""
    estimator: str = "grpo"
    returns: ReturnRule = "last"
    credit: Credit = "trajectory"
    gamma: float = 1.0
    """Discount per turn, with credit by turn."""
    mode: Mode = "linear"
    train: tuple[str, ...] = TRAINED
    """Roles whose steps carry loss."""
    named_roles: tuple[str, ...] = ()
    """Roles that have rewards and baselines of their own, in the order of their numbers (`steps.roles`)."""
    max_staleness: int | None = None
    """Versions after which a token carries no loss; None: no bound."""
    layout: Layout = "packed"

    def __post_init__(self) -> None:
        choices = (("returns", ReturnRule), ("credit", Credit), ("mode", Mode), ("layout", Layout))
        for name, known in choices:
            check_choice(name, getattr(self, name), known)
        if Role.MAIN not in self.train:
            raise ValueError(f"train={self.train}: {Role.MAIN} must be among the roles that carry loss")
        for name in ("ranks", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: there must be at least 1")

    @property
    def rule(self) -> Rule:
        """How advantages are made of rewards."""
        return Rule(self.estimator, self.returns, self.credit, self.gamma, self.named_roles)


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


class Formed(NamedTuple):
    """A mini-batch, and what only its lease needs."""

    batch: MiniBatch
    stale_G: Int64s
    """Tokens of each trajectory that are too stale to carry loss."""
    untrained_P: tuple[dict[Fate, int], ...]
    """Tokens of each group whose steps have roles that are not trained, by fate."""


def form_mini_batch(
    lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings
) -> MiniBatch:
    """The mini-batch of these groups, in their order, for a trainer at the history's newest version.

    Raises: see `formed`.
    """
    return formed(lease, groups, history, settings).batch


def formed(lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings) -> Formed:
    """As `form_mini_batch`, with the stale tokens of each trajectory.

    Raises:
        ValueError: no groups; a sampled token without log-probability, or of a version that is not published yet;
            a step whose trajectory has no end.
    """
    if not groups:
        raise ValueError("a mini-batch of no groups")
    steps = concat_steps([group.steps for group in groups])
    ends, prompt_G = _ends_in_order(groups)
    _refuse_untrainable(steps, history)
    trained, untrained_P = without_untrained(steps, ends, prompt_G, settings.train, settings.named_roles)
    merged = merge(trained, settings.mode, settings.rule.by_turn)
    length_R, trajectory_R = lengths_of(merged.rows.offsets_R), end_of_items(merged.rows, ends)
    sharing: dict[str, float] = {}
    ranks, budget, layout = settings.ranks, settings.token_budget, settings.layout
    if layout in ("packed", "padded"):
        placement = place(length_R, trajectory_R, ranks, budget, layout)
    else:
        placement, sharing = placed(merged.rows, trajectory_R, prompt_G, ranks, budget, layout)
    packed, order_R = in_packing_order(merged.rows, placement)
    trajectory_R = trajectory_R[order_R]
    sampled_G = _per_trajectory(packed, trajectory_R, len(ends))
    staleness_N, stale_G = _masked(packed, trajectory_R, len(ends), history, settings.max_staleness)
    loss_tokens_G = _per_trajectory(packed, trajectory_R, len(ends))
    return_G = returns(steps, ends, settings.returns)
    scores = advantages_of(steps, ends, prompt_G, settings.rule)
    if packed.turn_N is not None:  # from a turn of a trajectory to one of the mini-batch
        np.add(packed.turn_N, scores.first_turn_G[trajectory_R].repeat(lengths_of(packed.offsets_R)), out=packed.turn_N)
    micros = micro_batches(packed, staleness_N, trajectory_R, placement)
    metrics = (
        _merge_metrics(merged.counts)
        | _length_metrics(length_R, placement, micros)
        | sharing
        | reward_metrics(group_stats(return_G, prompt_G))
        | {"reward/mean_positive_reward": float(np.maximum(return_G, 0).sum() / max(len(return_G), 1))}
        | _turn_metrics(packed, steps, len(ends))
        | scores.metrics
        | _staleness_metrics(staleness_N, sampled_G, stale_G)
        | _token_metrics(steps, loss_tokens_G, stale_G, untrained_P)
    )
    batch = MiniBatch(
        lease=lease,
        groups=tuple(group.group_id for group in groups),
        advantage_G=scores.advantage_G.astype(np.float32),
        return_G=return_G,
        loss_tokens_G=loss_tokens_G,
        rows_G=np.bincount(trajectory_R, minlength=len(ends)).astype(np.int32),
        prompt_of_trajectory_G=prompt_G,
        ranks=micros,
        metrics=metrics,
        turn_advantage_X=scores.turn_advantage_X,
    )
    return Formed(batch, stale_G, untrained_P)


def _refuse_untrainable(steps: Steps, history: VersionHistory) -> None:
    """ValueError on sampled tokens without an importance ratio or a staleness."""
    if not steps.has_logprobs_K.all():
        lacking_N = steps.loss_mask_N & ~np.repeat(steps.has_logprobs_K, lengths_of(steps.offsets_K))
        if lacking_N.any():
            k = int(np.searchsorted(steps.offsets_K, lacking_N.argmax(), "right")) - 1
            raise ValueError(f"{name_of(steps, k)} has tokens to train, but logprobs=None: no ratio can be taken")
    if (newest := int(steps.versions_N.max(initial=NO_VERSION))) > history.published[history.current]:
        k = int(np.searchsorted(steps.offsets_K, steps.versions_N.argmax(), "right")) - 1
        raise ValueError(
            f"{name_of(steps, k)} was sampled at version {version_of(newest)}, but the newest of the history "
            f"is {history.current}; publish it there first"
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


# -- metrics: each function one family ------------------------------------------------------------------------------


def _merge_metrics(counts: dict[str, int]) -> dict[str, float]:
    """Steps before and rows after the merge, and how each step joined its row (`Merged.counts`)."""
    return {
        "generate/num_seq_before_merge": counts["steps"],
        "generate/num_seq_after_merge": counts["rows"],
        "generate/batch_num_seq": counts["rows"],
        "generate/merge_ratio": counts["steps"] / max(counts["rows"], 1),
        "generate/tokens_before_merge": counts["tokens_before"],
        "generate/tokens_after_merge": counts["tokens_after"],
        "generate/prefix_mismatches": counts["forked"] + counts["reset"],
        **{f"generate/steps_{outcome}": counts[outcome] for outcome in ("extended", "forked", "reset")},
    }


def _length_metrics(length_R: Int64s, placement: Placement, ranks: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
    """Lengths of the rows before they were packed, the padded length as they are packed, and the ranks' imbalance."""
    longest = int(length_R.max(initial=0))
    batches = [micro for rank in ranks for micro in rank if micro.trajectory_of_row_R[0] >= 0]  # the others are dummies
    padded = max((int(lengths_of(micro.offsets_R).max()) for micro in batches), default=0)
    total = int(length_R.sum())
    return {
        "generate/batch_padded_seq_len": padded,
        "generate/batch_longest_row": longest,
        "generate/batch_padding_ratio": 1 - total / (padded * len(length_R)) if total else 0.0,
        "generate/batch_num_tokens": total,
        "generate/batch_imbalance": placement.imbalance,
        "generate/batch_num_micro_batches": sum(len(rank) for rank in placement.ranks),
        "generate/batch_num_dummies": sum(not rows for rank in placement.ranks for rows in rank),
    }


def reward_metrics(trained: GroupStats, filtered: GroupStats | None = None) -> dict[str, float]:
    """Mean return, and the fractions of groups that have a positive return, or returns that are all equal.

    `filtered`: groups that filters removed, which count as if they were trained too.
    """
    every = trained if filtered is None else trained + filtered
    if not trained.groups:
        return {}
    return {
        "reward/avg_raw_reward": every.return_sum / every.trajectories,
        f"reward/avg_pass_at_{round(trained.trajectories / trained.groups)}": every.passed / every.groups,
        "reward/groups_without_variance": every.flat / every.groups,
        "reward/groups_all_zero": every.zeros / every.groups,
        "reward/groups_all_one": every.ones / every.groups,
        "generate/filtered_groups": float(every.groups - trained.groups),
    }


def _turn_metrics(rows: Rows, steps: Steps, count: int) -> dict[str, float]:
    """Per trajectory its turns, its tokens after first prompts, and its sampled tokens; the share of cut responses."""
    cut = {turns: n_truncated / n for turns, n, n_truncated in by_turn([steps])}
    responses = len(rows.token_ids_N) - int(rows.prompt_length_R.sum())
    return {
        "generate/avg_num_tokens": responses / max(count, 1),
        "generate/avg_assistant_tokens": int(np.count_nonzero(steps.loss_mask_N)) / max(count, 1),
        "generate/avg_num_turns": len(steps) / max(count, 1),
        "generate/truncated_ratio": float(is_truncated_K(steps).mean()) if len(steps) else 0.0,
        **{f"generate/truncated_ratio_turn_{turns}": ratio for turns, ratio in cut.items()},
    }


def _staleness_metrics(staleness_N: Int32s, sampled_G: Int64s, stale_G: Int64s) -> dict[str, float]:
    """Staleness of sampled tokens; the stale ones also by the length of their trajectory (quarter 4: the longest)."""
    sampled = int(np.count_nonzero(staleness_N >= 0))
    ages = int(staleness_N.sum(dtype=np.int64)) + len(staleness_N) - sampled  # each other token counts as -1
    quarters = np.array_split(stale_G[np.argsort(sampled_G, kind="stable")], 4)
    return {
        "async/staleness_mean": ages / max(sampled, 1),
        "async/staleness_max": float(staleness_N.max(initial=0)),
        "async/stale_tokens": float(stale_G.sum()),
        **{f"async/stale_tokens_quarter_{q}": float(part.sum()) for q, part in enumerate(quarters, 1)},
    }


def _token_metrics(
    steps: Steps, loss_tokens_G: Int64s, stale_G: Int64s, untrained_P: Sequence[dict[Fate, int]]
) -> dict[str, float]:
    """Sampled tokens by what became of them: sampled = loss + stale + untrained + masked."""
    sampled, loss, stale = float(np.count_nonzero(steps.loss_mask_N)), float(loss_tokens_G.sum()), float(stale_G.sum())
    untrained = float(sum(sum(tokens.values()) for tokens in untrained_P))
    return {
        "tokens/sampled": sampled,
        "tokens/loss": loss,
        "tokens/stale": stale,
        "tokens/untrained": untrained,
        "tokens/masked": sampled - loss - stale - untrained,
    }
