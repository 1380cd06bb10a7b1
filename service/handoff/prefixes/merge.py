"""Prefix-aware merge: the steps of a trajectory that continue one another become one row.

    step 0: prompt [10 20 30]                      response [40 50]
    step 1: prompt [10 20 30 40 50 60 70]          response [80 90]
    row   : prompt [10 20 30]  response [40 50 60 70 80 90]
                                  mask    1  1  0  0  1  1

Steps in the shared form lie on the token axis as the row does, so merging a trajectory whose steps each continue the
one before takes no copy: the row is the steps' tokens, and only the offsets change. Trajectories that branch are
built segment by segment (`service.handoff.prefixes.branches`). Steps merge only if their temperature is the same and
both or neither have log-probabilities, because a row has one of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from service.columns import lengths_of, offsets_of
from service.handoff.prefixes.branches import Drift, Mode, Rule, branching_rows, check_choice
from service.handoff.prefixes.history import name_of
from service.handoff.prefixes.references import assembled, check_chain, in_order, total_lengths, whole_prompts
from service.handoff.steps.tables import row_objects, steps_table, with_token_rewards
from service.types import ROUTE_NATIVELY, Bools, Float32s, Int16s, Int64s, Row, Rows, Step, Steps


class Merged(NamedTuple):
    """Rows, and how they came about."""

    rows: Rows
    counts: dict[str, int]
    """Steps by outcome (`extended`, `forked`, `realigned`, `reset`), `realigned_tokens` that lost their loss,
    `steps` and `rows`, `tokens_before` (of the steps as rows of their own) and `tokens_after`."""


class Plan(NamedTuple):
    """Which segments of the token axis make up which rows."""

    start_S: Int64s
    stop_S: Int64s
    live_S: Bools
    row_S: Int64s
    """The item that begins the segment's row."""
    last_K: Int64s
    """[K] at a row's first item, its last item."""
    moved: tuple[tuple[int, int, float], ...] = ()
    """(item that begins a row, place in the row, reward that moved there)."""


def merge_steps(steps: Iterable[Step], mode: Mode = "linear", drift: Drift = "fork") -> list[Row]:
    """The rows of any number of trajectories, in order of each trajectory's first appearance, then of steps.

    A reward stands on its step's last response token, so one of a step without response tokens is in no `Row.rewards`.

    Raises:
        ValueError: a trajectory has two prompts, or lacks a step before its last; a step came twice, and not the same;
            what a step extends is not there; an unknown `mode` or `drift`.

    >>> from service.types import TrajectoryId
    >>> def step(index, prompt, response):
    ...     ids = np.array(response, np.int32)
    ...     sampled, versions = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    ...     return Step(TrajectoryId(0, 0), "a", index, np.array(prompt, np.int32), ids, None, sampled, versions)
    >>> [row] = merge_steps([step(0, [10, 20, 30], [40, 50]), step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90])])
    >>> row.prompt_ids.tolist(), row.response_ids.tolist(), row.loss_mask.astype(int).tolist()
    ([10, 20, 30], [40, 50, 60, 70, 80, 90], [1, 1, 0, 0, 1, 1])
    """
    if not (listed := list(steps)):
        return []
    table = steps_table(listed)
    check_whole(table)
    rows = merge(with_token_rewards(table), mode, drift).rows
    return row_objects(rows if table.token_rewards_N is None else replace(rows, reward_R=None))


def merge(steps: Steps, mode: Mode = "linear", drift: Drift = "fork", max_drift_tokens: int = 16) -> Merged:
    """Merge all trajectories of a table; steps may come in any order, and identical duplicates count once."""
    check_choice("mode", mode, Mode)
    check_choice("drift", drift, Drift)
    steps, number_K = in_order(steps)
    first_K = np.ones(len(steps), np.bool_)
    first_K[1:] = number_K[1:] != number_K[:-1]
    counts = dict.fromkeys(("extended", "forked", "realigned", "reset", "realigned_tokens"), 0)
    if mode == "off":
        plan = _one_row_a_step(steps := whole_prompts(steps))
    else:
        plan = _plan(steps, first_K, number_K, Rule(mode, drift, max_drift_tokens), counts)
    rows = _rows(steps, plan)
    counts |= {"steps": len(steps), "rows": len(rows)}
    counts |= {"tokens_before": int(total_lengths(steps).sum()), "tokens_after": len(rows.token_ids_N)}
    return Merged(rows, counts)


def check_whole(steps: Steps) -> None:
    """ValueError unless each trajectory is of one prompt, and has every step before its last."""
    steps, number_K = in_order(steps)
    first_K = np.ones(len(steps), np.bool_)
    first_K[1:] = number_K[1:] != number_K[:-1]
    start_K = np.maximum.accumulate(np.where(first_K, np.arange(len(steps)), 0))
    for k in np.flatnonzero(steps.uid_K != steps.uid_K[start_K])[:1].tolist():
        one, other = steps.uids[steps.uid_K[start_K[k]]], steps.uids[steps.uid_K[k]]
        raise ValueError(f"{name_of(steps, k)} is of prompt {other!r}, but its trajectory began with {one!r}")
    for k in np.flatnonzero(steps.index_K != np.arange(len(steps)) - start_K)[:1].tolist():
        raise ValueError(f"{name_of(steps, k)} is there, but step {k - start_K[k]} before it is not")


def _one_row_a_step(steps: Steps) -> Plan:
    item_K: Int64s = np.arange(len(steps))
    live_K: Bools = np.ones(len(steps), np.bool_)
    return Plan(steps.offsets_K[:-1], steps.offsets_K[1:], live_K, item_K, item_K)


def _plan(steps: Steps, first_K: Bools, number_K: Int64s, rule: Rule, counts: dict[str, int]) -> Plan:
    """Chains of steps as they lie; trajectories that branch, one by one."""
    chained_K, skip_K = _chains(steps, first_K, number_K)
    item_K = np.arange(len(steps))
    chain_S, begins_K = item_K[chained_K], np.maximum.accumulate(np.where(first_K, item_K, 0))
    last_K = item_K.copy()
    last_K[begins_K[chain_S]] = chain_S  # ascending, so the last one stays
    counts["extended"] += int(np.count_nonzero(chained_K & ~first_K))
    start_S, stop_S = steps.offsets_K[chain_S] + skip_K[chain_S], steps.offsets_K[chain_S + 1]
    live_S: Bools = np.ones(len(chain_S), np.bool_)
    plan = Plan(start_S, stop_S, live_S, begins_K[chain_S], last_K)
    return plan if chained_K.all() else _with_branches(steps, first_K, chained_K, rule, counts, plan)


def _with_branches(
    steps: Steps, first_K: Bools, chained_K: Bools, rule: Rule, counts: dict[str, int], plan: Plan
) -> Plan:
    """The plan of the chains, and that of the trajectories that branch."""
    bounds_G = np.append(np.flatnonzero(first_K), len(steps))
    segments: list[tuple[Any, ...]] = [plan[:4]]
    moved: list[tuple[int, int, float]] = []
    for g in np.flatnonzero(~chained_K[bounds_G[:-1]]).tolist():
        for row in branching_rows(steps, int(bounds_G[g]), int(bounds_G[g + 1]), rule, counts):
            plan.last_K[row.steps[0]] = row.steps[-1]
            moved += [(row.steps[0], place, reward) for place, reward in row.moved.items()]
            start_S, stop_S, live_S, _ = np.array(row.segments, np.int64).reshape(-1, 4).T
            segments.append((start_S, stop_S, live_S.astype(np.bool_), np.full(len(start_S), row.steps[0], np.int64)))
    start_S, stop_S, live_S, row_S = (np.concatenate(columns) for columns in zip(*segments, strict=True))
    order = np.argsort(row_S, kind="stable")
    return Plan(start_S[order], stop_S[order], live_S[order], row_S[order], plan.last_K, tuple(moved))


def _chains(steps: Steps, first_K: Bools, number_K: Int64s) -> tuple[Bools, Int64s]:
    """Steps of trajectories in which each continues the one before, and how many own tokens repeat that one's."""
    before_K = np.concatenate(([0], total_lengths(steps)[:-1]))
    index_before_K = np.concatenate(([-1], steps.index_K[:-1]))
    full_K, alike_K = steps.extends_K < 0, first_K | _alike_previous(steps)
    refers_K = ~full_K & (steps.extends_K == index_before_K) & (steps.extends_length_K == before_K)
    refers_K = _of_whole_trajectories(alike_K & np.where(first_K, full_K, refers_K), number_K)
    if refers_K.any():
        check_chain(steps, first_K, refers_K)
    whole_K = _of_whole_trajectories(alike_K & full_K, number_K) & ~refers_K
    repeats_K = _repeats(steps, whole_K & ~first_K & (before_K <= steps.prompt_length_K))
    whole_K = _of_whole_trajectories((whole_K & first_K) | repeats_K, number_K)
    return refers_K | whole_K, np.where(repeats_K, before_K, 0)


def _alike_previous(steps: Steps) -> Bools:
    """[K] whether the step may share a row with the item before it."""
    alike_K = np.ones(len(steps), np.bool_)
    for column_K in (steps.temperature_K, steps.has_logprobs_K):
        alike_K[1:] &= column_K[1:] == column_K[:-1]
    return alike_K


def _of_whole_trajectories(good_K: Bools, number_K: Int64s) -> Bools:
    """[K] True where all steps of the trajectory are good."""
    bad_G = np.bincount(number_K, ~good_K)
    return np.asarray(bad_G[number_K] == 0)


def _repeats(steps: Steps, candidate_K: Bools) -> Bools:
    """Of full-prompt steps, those that begin with all tokens of the item before them."""
    repeats_K = np.zeros(len(steps), np.bool_)
    ids_N, offsets = steps.token_ids_N, steps.offsets_K.tolist()
    for k in np.flatnonzero(candidate_K).tolist():
        start, middle = offsets[k - 1], offsets[k]
        repeats_K[k] = (ids_N[start:middle] == ids_N[middle : middle + middle - start]).all()
    return repeats_K


def _rows(steps: Steps, plan: Plan) -> Rows:
    length_S, begins_S = plan.stop_S - plan.start_S, np.ones(len(plan.row_S), np.bool_)
    begins_S[1:] = plan.row_S[1:] != plan.row_S[:-1]
    first_R, begin_R = plan.row_S[begins_S], np.flatnonzero(begins_S)
    last_R = plan.last_K[first_R]
    response_K = lengths_of(steps.offsets_K) - steps.prompt_length_K
    columns = assembled(steps, plan.start_S, plan.stop_S, plan.live_S)
    offsets_R = offsets_of(np.add.reduceat(length_S, begin_R) if len(begin_R) else length_S)
    if plan.moved and steps.token_rewards_N is not None:
        columns["token_rewards_N"] = _with_moved(columns["token_rewards_N"], offsets_R, first_R, plan)
    if steps.routed_experts_N is not None:
        columns["routed_experts_N"] = _observations_routed_natively(steps, plan, columns["routed_experts_N"])
    return Rows(
        uids=steps.uids,
        stop_reasons=steps.stop_reasons,
        group_id_R=steps.group_id_K[first_R],
        sample_R=steps.sample_K[first_R],
        attempt_R=steps.attempt_K[first_R],
        uid_R=steps.uid_K[first_R],
        stop_reason_R=steps.stop_reason_K[last_R],
        first_step_R=steps.index_K[first_R],
        last_step_R=steps.index_K[last_R],
        temperature_R=steps.temperature_K[first_R],
        has_logprobs_R=steps.has_logprobs_K[first_R],
        prompt_length_R=(total_lengths(steps) - response_K)[first_R].astype(np.int32),
        offsets_R=offsets_R,
        reward_R=steps.reward_K[last_R],
        **columns,
    )


def _with_moved(rewards_N: Float32s, offsets_R: Int64s, first_R: Int64s, plan: Plan) -> Float32s:
    """Rewards of rows with those that realigning moved."""
    rewards_N = rewards_N.copy()
    for item, place, reward in plan.moved:
        rewards_N[offsets_R[np.searchsorted(first_R, item)] + place] += reward
    return rewards_N


def _observations_routed_natively(steps: Steps, plan: Plan, experts_N: Int16s) -> Int16s:
    """Routed experts of rows: none on what stands between responses."""
    item_S = np.searchsorted(steps.offsets_K, plan.start_S, "right") - 1
    prompt_end_S = steps.offsets_K[item_S] + steps.prompt_length_K[item_S]
    observed_S = np.clip(prompt_end_S - plan.start_S, 0, plan.stop_S - plan.start_S)
    observed_S[(item_S == plan.row_S) | ~plan.live_S] = 0
    rest_S = plan.stop_S - plan.start_S - observed_S
    observed_N = np.repeat(np.tile([True, False], len(observed_S)), np.stack((observed_S, rest_S), axis=1).reshape(-1))
    return np.where(observed_N[:, None, None], np.int16(ROUTE_NATIVELY), experts_N)
