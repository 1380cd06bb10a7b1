"""The mini-batch as a pipeline: whole groups in, micro-batches of every rank out. Axis letters as in `service.types`.

| stage    | in -> out                                                | where                                    |
|----------|----------------------------------------------------------|------------------------------------------|
| `filter` | a complete group -> itself, or the event that ends it    | `filters`, once the group is complete    |
| `gather` | groups [P] -> `Played`: steps [K] in order, ends [G]     | here                                     |
| `merge`  | steps [K] -> rows [R]                                    | `prefixes.merge`                         |
| `score`  | `Played` [K], [G] -> advantages [G], by turn [K]         | `score`                                  |
| `pack`   | rows [R] -> rows [R] in packing order, with their places | `pack`                                   |
| `mask`   | rows [R] -> the same rows, fewer tokens [N] with loss    | here                                     |

    a group of 2 trajectories, of 2 steps and of 1; the second step continues the first:
    gather   a0 a1 b0                    merge   a0+a1 (9 tokens), b0 (4)
    pack     rank 0: a   rank 1: b       mask    of 4 + 1 sampled tokens one is stale: 3 + 1 carry loss
    score    returns 1 0 -> advantages 0.7 -0.7

`generate/batch_padded_seq_len` is the padded length: the length of every row if all rows lay in one rectangle.

    rows of 6, 5 and 3 tokens   ->   padded length 6, 14 tokens, padding ratio 1 - 14 / (3 * 6)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from service.columns import check_choice, concat, lengths_of, select
from service.handoff.batches.pack import Layout, Placement, in_packing_order, micro_batches, placed
from service.handoff.batches.score import Credit, ReturnRule, Rule, score
from service.handoff.ledger.lifecycle import Fate
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.versions import VersionHistory, version_of
from service.handoff.prefixes.merge import Mode, merge_in_order
from service.handoff.steps.roles import ROLES, TRAINED, Role
from service.handoff.steps.tables import Played, by_turn, concat_steps, is_truncated_K, name_of
from service.types import NO_VERSION, Int32s, Int64s, MicroBatch, MiniBatch, Row, Rows, Steps


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
            a step whose trajectory has no end; a step that came twice.
    """
    if not groups:
        raise ValueError("a mini-batch of no groups")
    played, prompt_G = gather(groups)
    _refuse_untrainable(played.steps, history)
    steps, untrained_P = without_untrained(played, prompt_G, settings)
    merged = merge_in_order(steps, played.end_K, settings.mode, settings.rule.by_turn)
    trajectory_R = played.end_K[merged.first_R].astype(np.int32)
    scores = score(played, prompt_G, settings.rule)
    placement, sharing = placed(
        merged.rows, trajectory_R, prompt_G, settings.ranks, settings.token_budget, settings.layout
    )
    rows, order_R = in_packing_order(merged.rows, placement)
    trajectory_R = trajectory_R[order_R]
    masked = mask(rows, trajectory_R, len(prompt_G), history, settings.max_staleness)
    ranks = micro_batches(rows, masked.staleness_N, trajectory_R, placement)
    metrics = (
        _merge_metrics(merged.counts)
        | _length_metrics(lengths_of(merged.rows.offsets_R), placement, ranks)
        | sharing
        | _turn_metrics(rows, played.steps, len(prompt_G))
        | scores.metrics
        | _staleness_metrics(masked)
        | _token_metrics(played.steps, masked, untrained_P)
    )
    batch = MiniBatch(
        lease=lease,
        groups=tuple(group.group_id for group in groups),
        advantage_G=scores.advantage_G.astype(np.float32),
        return_G=scores.return_G,
        loss_tokens_G=masked.loss_G,
        rows_G=np.bincount(trajectory_R, minlength=len(prompt_G)).astype(np.int32),
        prompt_of_trajectory_G=prompt_G,
        ranks=ranks,
        metrics=metrics,
        turn_advantage_X=scores.turn_advantage_K,
    )
    return Formed(batch, masked.stale_G, untrained_P)


def gather(groups: Sequence[CompleteGroup]) -> tuple[Played, Int32s]:
    """The trajectories in the order of groups, then samples; and each one's group."""
    steps, ends = concat_steps([group.steps for group in groups]), concat([group.ends for group in groups])
    prompt_G = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.ends) for group in groups])
    order = np.lexsort((ends.sample_E, prompt_G))
    return Played.of(steps, select(ends, order)), prompt_G[order]


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


def without_untrained(
    played: Played, prompt_G: Int32s, settings: BatchSettings
) -> tuple[Steps, tuple[dict[Fate, int], ...]]:
    """The steps, without loss where their roles are not trained; and the tokens of each group that lost it, by fate.

    The tokens stay, because later steps may continue them:

        trajectory   step 0 aux [7 8]   step 1 main [1 2 3]   step 2 main, after it [4]
        loss                 0 0                1 1 1                               1      2 tokens of the fate aux
    """
    steps, names = played.steps, (*ROLES, *settings.named_roles)
    untrained_K = ~np.isin(played.role_K, [code for code, role in enumerate(names) if role in settings.train])
    counts = [Counter[Fate]() for _ in range(int(prompt_G.max(initial=-1)) + 1)]
    if not untrained_K.any():
        return steps, tuple(map(dict, counts))
    for k in np.flatnonzero(untrained_K).tolist():
        # Of the named roles only a judge has tokens that the policy sampled and is not trained on.
        fate = Fate(ROLES[played.role_K[k]]) if played.role_K[k] < len(ROLES) else Fate.JUDGE
        sampled = np.count_nonzero(steps.loss_mask_N[steps.offsets_K[k] : steps.offsets_K[k + 1]])
        counts[prompt_G[played.end_K[k]]][fate] += int(sampled)
    mask_N = steps.loss_mask_N & ~np.repeat(untrained_K, lengths_of(steps.offsets_K))
    return replace(steps, loss_mask_N=mask_N), tuple(map(dict, counts))


class Masked(NamedTuple):
    """What is left of the loss, and why."""

    staleness_N: Int32s
    """Versions between sampling and training; -1 where no policy sampled the token."""
    sampled_G: Int64s
    """Tokens of each trajectory that carried loss before; then those that are too stale, and those that carry it."""
    stale_G: Int64s
    loss_G: Int64s


def mask(rows: Rows, trajectory_R: Int32s, count: int, history: VersionHistory, max_staleness: int | None) -> Masked:
    """Take the loss, in place, from tokens without a finite log-probability and from stale tokens.

    staleness     -1 0 3 3       max_staleness 2
    log-probab.    0 . . nan
    loss before    0 1 1 1   ->  0 1 0 0       1 stale token
    """
    staleness_N, mask_N = history.staleness(rows.versions_N, history.current), rows.loss_mask_N
    sampled_G = _per_trajectory(rows, trajectory_R, count)
    finite_N = np.isfinite(rows.logprobs_N)
    if not finite_N.all():
        np.logical_and(mask_N, finite_N, out=mask_N)
    loss_G = _per_trajectory(rows, trajectory_R, count)
    stale_G = np.zeros(count, np.int64)
    if max_staleness is not None and staleness_N.max(initial=0) > max_staleness:
        np.logical_and(mask_N, staleness_N <= max_staleness, out=mask_N)
        stale_G = loss_G - _per_trajectory(rows, trajectory_R, count)
    np.copyto(rows.logprobs_N, 0, where=~mask_N)
    return Masked(staleness_N, sampled_G, stale_G, loss_G - stale_G)


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


def _turn_metrics(rows: Rows, steps: Steps, count: int) -> dict[str, float]:
    """Per trajectory its turns, its tokens after first prompts, and its sampled tokens; the share of cut responses."""
    responses = len(rows.token_ids_N) - int(rows.prompt_length_R.sum())
    return {
        "generate/avg_num_tokens": responses / max(count, 1),
        "generate/avg_assistant_tokens": int(np.count_nonzero(steps.loss_mask_N)) / max(count, 1),
        "generate/avg_num_turns": len(steps) / max(count, 1),
        "generate/truncated_ratio": float(is_truncated_K(steps).mean()) if len(steps) else 0.0,
        **{f"generate/truncated_ratio_turn_{turns}": n_cut / n for turns, n, n_cut in by_turn([steps])},
    }


def _staleness_metrics(masked: Masked) -> dict[str, float]:
    """Staleness of sampled tokens; the stale ones also by the length of their trajectory (quarter 4: the longest)."""
    staleness_N, stale_G = masked.staleness_N, masked.stale_G
    sampled = int(np.count_nonzero(staleness_N >= 0))
    ages = int(staleness_N.sum(dtype=np.int64)) + len(staleness_N) - sampled  # each other token counts as -1
    quarters = np.array_split(stale_G[np.argsort(masked.sampled_G, kind="stable")], 4)
    return {
        "async/staleness_mean": ages / max(sampled, 1),
        "async/staleness_max": float(staleness_N.max(initial=0)),
        "async/stale_tokens": float(stale_G.sum()),
        **{f"async/stale_tokens_quarter_{q}": float(part.sum()) for q, part in enumerate(quarters, 1)},
    }


def _token_metrics(steps: Steps, masked: Masked, untrained_P: Sequence[dict[Fate, int]]) -> dict[str, float]:
    """Sampled tokens by what became of them: sampled = loss + stale + untrained + masked."""
    sampled, loss, stale = (
        float(np.count_nonzero(steps.loss_mask_N)),
        float(masked.loss_G.sum()),
        float(masked.stale_G.sum()),
    )
    untrained = float(sum(sum(tokens.values()) for tokens in untrained_P))
    return {
        "tokens/sampled": sampled,
        "tokens/loss": loss,
        "tokens/stale": stale,
        "tokens/untrained": untrained,
        "tokens/masked": sampled - loss - stale - untrained,
    }


# -- rows and ranks ---------------------------------------------------------------------------------------------------


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


def batch_of_rank(batch: MiniBatch, rank: int) -> MiniBatch:
    """The same mini-batch with the micro-batches of one rank only."""
    return replace(batch, ranks=(batch.ranks[rank],))
