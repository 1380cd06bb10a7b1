"""The mini-batch as a pipeline: whole groups in, micro-batches of every rank out; `ends` are end records.

| stage    | in -> out                                                | where                                    |
|----------|----------------------------------------------------------|------------------------------------------|
| `score`  | steps, ends, answers of scorers -> steps, ends rewarded  | `ledger.scores`, each time groups load   |
| `filter` | complete group -> the same group, or its event `Ended`   | `filters`, once the group is complete    |
| `gather` | groups [P] -> `Episodes`: steps [K] in order, ends [G]   | here                                     |
| `roles`  | steps [K] -> the same, without loss for untrained roles  | here                                     |
| `merge`  | steps [K] -> rows [R]                                    | `prefixes.merge`                         |
| `credit` | `Episodes` [K], [G] -> advantages [G], by turn [X]       | `credit`                                 |
| `pack`   | rows [R] -> rows [R] in packing order, with their places | `pack`                                   |
| `mask`   | rows [R], changed in place -> `LossMask`: counts [G]       | here                                     |
| `cut`    | rows [R] -> the micro-batches of every rank              | `pack.micro_batches`                     |

    a group of trajectory a with steps 0 and 1, of which 1 continues 0, and trajectory b with step 0:
    gather   a0 a1 b0                    merge   a0+a1 (9 tokens), b0 (4)
    credit   returns 1 0 -> advantages 0.7 -0.7
    pack     rank 0: a   rank 1: b       mask    of 4 + 1 sampled tokens one is stale: 3 + 1 carry loss
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from service.columns import check_choice, concat, lengths_of, select
from service.handoff.batches.batch_metrics import (
    info_means,
    length_metrics,
    merge_metrics,
    staleness_metrics,
    token_metrics,
    turn_metrics,
)
from service.handoff.batches.credit import Credit, ReturnRule, Rule, advantages_of
from service.handoff.batches.pack import Layout, choose_placement, micro_batches
from service.handoff.ledger.events import Fate
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import Mode, check_whole, merge_in_order
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.tables import Episodes, ends_table, name_of, steps_table
from service.handoff.steps.values import ROLES, TRAINED, Role
from service.types import Int32s, Int64s, MiniBatch, Rows, Step, Steps, TrajectoryEnd


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings by which a mini-batch is made from groups."""

    ranks: int
    """Number of parts of the mini-batch: one per rank; with sequence parallelism, one per group of ranks."""
    token_budget: int
    """Maximum number of tokens in a micro-batch; a longer row gets a micro-batch of its own."""
    rule: Rule = field(default_factory=Rule)
    mode: Mode = "linear"
    train: tuple[str, ...] = TRAINED
    """Roles whose steps carry loss."""
    max_staleness: int | None = None
    """Staleness, in versions, above which a token carries no loss; None: no bound."""
    layout: Layout = "packed"

    def __post_init__(self) -> None:
        check_choice("returns", self.rule.returns, ReturnRule)
        check_choice("credit", self.rule.credit, Credit)
        check_choice("mode", self.mode, Mode)
        check_choice("layout", self.layout, Layout)
        if Role.MAIN not in self.train:
            raise ValueError(f"train={self.train}: {Role.MAIN} must be among the roles that carry loss")
        for name in ("ranks", "token_budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: there must be at least 1")


class BatchResult(NamedTuple):
    """A mini-batch, with token counts that are needed only to lease it."""

    batch: MiniBatch
    stale_G: Int64s
    """Number of tokens of each trajectory that are too stale to carry loss."""
    untrained_P: tuple[dict[Fate, int], ...]
    """For each group, the number of tokens in steps of untrained roles, by fate."""


def form_mini_batch(
    lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings
) -> MiniBatch:
    """The mini-batch of `formed`, for a trainer that has the newest version of `history`; raises the same errors."""
    return formed(lease, groups, history, settings).batch


def formed(
    lease: int, groups: Sequence[CompleteGroup], history: VersionHistory, settings: BatchSettings
) -> BatchResult:
    """Make the mini-batch of a lease, and count each trajectory's stale tokens and each group's untrained tokens.

    Raises a ValueError if there are no groups, a trajectory is incomplete, or a token lacks log-probability or version.
    """
    if not groups:
        raise ValueError("a mini-batch of no groups")
    played, prompt_G = gather(groups)
    _refuse_untrainable(played.steps, history)
    steps, untrained_P = without_untrained(played, prompt_G, settings.train, settings.rule.named)
    merged = merge_in_order(steps, played.end_K, settings.mode, settings.rule.by_turn)
    trajectory_R = played.end_K[merged.first_R].astype(np.int32)
    advantages = advantages_of(played, prompt_G, settings.rule)
    placement, sharing = choose_placement(
        merged.rows, trajectory_R, prompt_G, settings.ranks, settings.token_budget, settings.layout
    )
    rows, trajectory_R = select(merged.rows, placement.row_R, copy=True), trajectory_R[placement.row_R]
    staleness_N = history.staleness(rows.versions_N, history.current)
    masked = mask(rows, staleness_N, trajectory_R, len(prompt_G), settings.max_staleness)
    ranks = micro_batches(rows, staleness_N, trajectory_R, placement)
    metrics = (
        merge_metrics(merged.counts)
        | length_metrics(lengths_of(merged.rows.offsets_R), placement, ranks)
        | sharing
        | advantages.metrics
        | staleness_metrics(staleness_N, masked.loss_before_G, masked.stale_G)
        | token_metrics(played.steps, masked.loss_G, masked.stale_G, untrained_P)
        | info_means(played.ends)
        | turn_metrics(rows, played.steps, len(prompt_G))
    )
    batch = MiniBatch(
        lease=lease,
        groups=tuple(group.group_id for group in groups),
        advantage_G=advantages.advantage_G.astype(np.float32),
        return_G=advantages.return_G,
        loss_tokens_G=masked.loss_G,
        rows_G=np.bincount(trajectory_R, minlength=len(prompt_G)).astype(np.int32),
        prompt_of_trajectory_G=prompt_G,
        ranks=ranks,
        metrics=metrics,
        turn_advantage_X=advantages.turn_advantage_K,
    )
    return BatchResult(batch, masked.stale_G, untrained_P)


def gather(groups: Sequence[CompleteGroup]) -> tuple[Episodes, Int32s]:
    """The groups' trajectories, ordered by group, then by sample; and [G] the place of each trajectory's group."""
    steps, ends = concat([group.steps for group in groups]), concat([group.ends for group in groups])
    prompt_G = np.repeat(np.arange(len(groups), dtype=np.int32), [len(group.ends) for group in groups])
    order = np.lexsort((ends.sample_E, prompt_G))
    return Episodes.of(steps, select(ends, order)), prompt_G[order]


def _refuse_untrainable(steps: Steps, history: VersionHistory) -> None:
    lacking_N = steps.loss_mask_N & ~np.repeat(steps.has_logprobs_K, lengths_of(steps.offsets_K))
    ahead_N = steps.versions_N > history.current.pack()
    ahead = f"was sampled at a version newer than {history.current}, the history's newest: publish it there first"
    for wrong_N, why in (
        (lacking_N, "has tokens to train, but logprobs=None: its ratio cannot be computed"),
        (ahead_N, ahead),
    ):
        if wrong_N.any():
            k = int(np.searchsorted(steps.offsets_K, wrong_N.argmax(), "right")) - 1
            raise ValueError(f"{name_of(steps, k)} {why}")


def without_untrained(
    played: Episodes, prompt_G: Int32s, train: Sequence[str], named_roles: Sequence[str]
) -> tuple[Steps, tuple[dict[Fate, int], ...]]:
    """The steps, without loss where a step's role is not trained; and [P] the sampled tokens of such steps, by fate."""
    steps, names = played.steps, (*ROLES, *named_roles)
    untrained_K = ~np.isin(played.role_K, [code for code, role in enumerate(names) if role in train])
    counts = [Counter[Fate]() for _ in range(int(prompt_G.max(initial=-1)) + 1)]
    for k in np.flatnonzero(untrained_K).tolist():
        # Among the named roles, only a judge has tokens that the policy sampled but is not trained on.
        fate = Fate(ROLES[played.role_K[k]]) if played.role_K[k] < len(ROLES) else Fate.JUDGE
        sampled = np.count_nonzero(steps.loss_mask_N[steps.offsets_K[k] : steps.offsets_K[k + 1]])
        counts[prompt_G[played.end_K[k]]][fate] += int(sampled)
    mask_N = steps.loss_mask_N & ~np.repeat(untrained_K, lengths_of(steps.offsets_K))
    return replace(steps, loss_mask_N=mask_N), tuple(map(dict, counts))


class LossMask(NamedTuple):
    """Numbers of tokens of each trajectory: tokens that carried loss before `mask`, tokens that are too stale, and
    tokens that still carry loss."""

    loss_before_G: Int64s
    stale_G: Int64s
    loss_G: Int64s


def mask(rows: Rows, staleness_N: Int32s, trajectory_R: Int32s, count: int, max_staleness: int | None) -> LossMask:
    """Set the loss mask of stale tokens and of tokens without a finite log-probability to False, in place; G = `count`.

    staleness     -1 0 3 3       max_staleness 2
    log-probab.    0 . . nan
    loss mask      0 1 1 1   ->  0 1 0 0       1 stale token
    """
    loss_before_G, mask_N = _per_trajectory(rows, trajectory_R, count), rows.loss_mask_N
    finite_N = np.isfinite(rows.logprobs_N)
    np.logical_and(mask_N, finite_N, out=mask_N)
    loss_G = _per_trajectory(rows, trajectory_R, count)
    stale_G = np.zeros(count, np.int64)
    if max_staleness is not None and staleness_N.max(initial=0) > max_staleness:
        np.logical_and(mask_N, staleness_N <= max_staleness, out=mask_N)
        stale_G = loss_G - _per_trajectory(rows, trajectory_R, count)
    np.copyto(rows.logprobs_N, 0, where=~mask_N)
    return LossMask(loss_before_G, stale_G, loss_G - stale_G)


def _per_trajectory(rows: Rows, trajectory_R: Int32s, count: int) -> Int64s:
    """[G] the number of tokens that carry loss in each trajectory."""
    tokens_R = [np.count_nonzero(rows.loss_mask_N[start:stop]) for start, stop in pairwise(rows.offsets_R.tolist())]
    return np.bincount(trajectory_R, tokens_R, minlength=count).astype(np.int64)


def batch_of_rank(batch: MiniBatch, rank: int) -> MiniBatch:
    """The mini-batch with the micro-batches of one rank only."""
    return replace(batch, ranks=(batch.ranks[rank],))


def complete_groups(steps: Iterable[Step], ends: Iterable[TrajectoryEnd] | None = None) -> list[CompleteGroup]:
    """Make one group per group_id from whole trajectories, in order of the first appearance of the group_id.

    Steps may have whole prompts or references. Without `ends`, each trajectory ends with its last step, and has the
    stop reason and the reward of this step.

    Raises a ValueError if a trajectory lacks a step or the right end record, or a group has two prompts.
    """
    listed = list(steps)
    if ends is None:
        last = {step.trajectory: step for step in sorted(listed, key=lambda step: step.index)}
        ends = [
            TrajectoryEnd(of, step.prompt_uid, step.index + 1, step.stop_reason, step.reward)
            for of, step in last.items()
        ]
    finished, uids = list(ends), dict[int, str]()
    items: list[Step | TrajectoryEnd] = [*listed, *finished]
    for item in items:
        group_id, own = item.trajectory.group_id, item.prompt_uid
        if (uid := uids.setdefault(group_id, own)) != own:
            raise ValueError(f"group={group_id} has the prompts {uid!r} and {own!r}; a group has one prompt")
    all_steps, all_ends = check_whole(steps_table(shared_form(listed))), ends_table(finished)
    n_steps_E = lengths_of(Episodes.of(all_steps, all_ends).first_G)
    for e in np.flatnonzero(n_steps_E != all_ends.n_steps_E)[:1].tolist():
        end = finished[e]
        raise ValueError(f"{end.trajectory} ended after {end.n_steps} steps, but {n_steps_E[e]} are there")
    return [
        CompleteGroup(
            group_id, uid,
            select(all_steps, np.flatnonzero(all_steps.group_id_K == group_id)),
            select(all_ends, np.flatnonzero(all_ends.group_id_E == group_id)),
        )
        for group_id, uid in uids.items()
    ]  # fmt: skip
