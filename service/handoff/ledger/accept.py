"""What the buffer knows and a message alone does not: identity, attempts, versions, duplicates, whole trajectories.

`plan` only looks; it changes nothing. Everything that concerns single tokens is done once for the whole message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from service.columns import select
from service.handoff.group_bytes import bytes_per_token, item_bytes
from service.handoff.ledger.events import Fresh
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import Group, Trajectory
from service.handoff.ledger.store import Store
from service.handoff.prefixes.prefix_index import PrefixIndex
from service.handoff.prefixes.sharing import Chain, dedupe_prefixes, grown
from service.handoff.prefixes.step_equality import index_of_steps, same_step
from service.handoff.prefixes.tree import token_bytes
from service.handoff.steps.stop_reason import FAILURES
from service.handoff.steps.tables import concat_steps, end_objects, ends_table, routing_of, trajectory_ids
from service.handoff.steps.validate import MAX_SHARE_NOT_FINITE, trajectory_refusal
from service.types import (
    Bools,
    Extension,
    Int64s,
    Refusal,
    RefusalReason,
    StepGroup,
    Steps,
    TrajectoryEnd,
    TrajectoryId,
)


class Part(NamedTuple):
    """What a message brings for one trajectory."""

    steps: list[int]
    """Items of the message's steps."""
    ends: list[TrajectoryEnd]


class Plan(NamedTuple):
    """What accepting a message would change."""

    fresh: list[Fresh]
    parts: dict[int, Part]
    """What to keep, by group_id."""
    chains: dict[tuple[int, int], Chain | None]
    """The trajectories' chains afterwards; None: it has none any more."""
    superseded: tuple[int, ...]
    """Ordinals for which the message came too late."""

    def leaves_out(self, message: StepGroup) -> bool:
        """Whether the message has items that are not kept: repetitions, ends of failed attempts, what came too late.

        Those were not checked, so a journal that held them would bring them back.
        """
        n_kept = sum(len(part.steps) + len(part.ends) for part in self.parts.values())
        return n_kept < len(message.steps) + len(message.ends)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A message's step columns as lists, and what was counted about each step's tokens."""

    index: list[int]
    uid: list[int]
    offsets: list[int]
    extends: list[int]
    extends_length: list[int]
    extends_digest: list[int]
    sampled: list[int]
    """Tokens that the policy sampled."""
    bad: list[int]
    """Of those, the ones whose log-probability is not a finite number."""
    tokens: memoryview
    """All token ids as bytes."""
    bytes_per_token: int

    @staticmethod
    def of(steps: Steps) -> _Columns:
        return _Columns(
            steps.index_K.tolist(),
            steps.uid_K.tolist(),
            steps.offsets_K.tolist(),
            steps.extends_K.tolist(),
            steps.extends_length_K.tolist(),
            steps.extends_digest_K.tolist(),
            _per_step(steps, steps.loss_mask_N),
            _per_step(steps, steps.loss_mask_N & ~np.isfinite(steps.logprobs_N)),
            token_bytes(steps.token_ids_N),
            bytes_per_token(steps),
        )


class _Case(NamedTuple):
    """One trajectory of a message, as the buffer stands."""

    id: TrajectoryId
    part: Part
    trajectory: Trajectory
    message: StepGroup
    columns: _Columns
    store: Store


def with_shared_prefixes(ledger: Ledger, store: Store, message: StepGroup) -> StepGroup:
    """The same message, in which full prompts carry only what no earlier step of their trajectory has.

    A step that is there already stays as it came: it will be dropped as a duplicate, or refused.
    """
    steps = message.steps
    wanted_K = (steps.extends_K < 0) & (steps.index_K > 0)
    if not wanted_K.any():
        return message
    deduped = dedupe_prefixes(
        steps,
        wanted_K & ~_known(ledger, steps, wanted_K),
        lambda of: store.chain_of(of.group_id, of.sample),
        lambda of: store.index_of(of.group_id, of.sample),
        any_branch=ledger.state.routing is not None,
    )
    return message if deduped is steps else replace(message, steps=deduped)


def _known(ledger: Ledger, steps: Steps, asked_K: Bools) -> Bools:
    """[K] which of the steps asked about were accepted before, or came too late."""
    known_K = np.zeros(len(steps), np.bool_)
    ids, indices = trajectory_ids(steps), steps.index_K.tolist()
    for k in np.flatnonzero(asked_K).tolist():
        group = ledger.state.groups.get(ids[k].group_id)
        if group is None or ids[k].sample >= len(group.trajectories):
            known_K[k] = True
        else:
            trajectory = group.trajectories[ids[k].sample]
            known_K[k] = ids[k].attempt != trajectory.attempt or indices[k] in trajectory.indices
    return known_K


def plan(ledger: Ledger, store: Store, message: StepGroup) -> Plan | Refusal:
    """What accepting a message would change, or why it cannot be accepted as a whole."""
    routing = routing_of(message.steps)
    if None not in (routing, ledger.state.routing) and routing != ledger.state.routing:
        return Refusal(RefusalReason.LENGTH_MISMATCH, f"routed_experts_N: {routing}, not {ledger.state.routing}")
    made = Plan([], {}, {}, ())
    columns = _Columns.of(message.steps)
    late: dict[int, None] = {}
    current: list[tuple[list[int], Group]] = []
    for trajectory_id, part in parts(message).items():
        group = _group(ledger, message, trajectory_id, part, columns)
        if isinstance(group, Refusal):
            return group
        if group is None:
            late[trajectory_id.group_id] = None
            continue
        current.append((part.steps, group))
        case = _Case(trajectory_id, part, group.trajectories[trajectory_id.sample], message, columns, store)
        if (refused := _add(made, case)) is not None:
            return refused
    return _version_refusal(ledger, message.steps, current) or made._replace(superseded=tuple(late))


def kept(message: StepGroup, made: Plan) -> StepGroup:
    """Only what a plan keeps of a message: the same plan follows from it."""
    items = sorted(k for part in made.parts.values() for k in part.steps)
    ends = [end for part in made.parts.values() for end in part.ends]
    return StepGroup(message.sender, select(message.steps, np.array(items, np.int64)), ends_table(ends))


def parts(message: StepGroup) -> dict[TrajectoryId, Part]:
    """The message's items by trajectory; they may interleave."""
    parts: dict[TrajectoryId, Part] = {}
    steps, ends = message.steps, message.ends
    ids = zip(steps.group_id_K.tolist(), steps.sample_K.tolist(), steps.attempt_K.tolist(), strict=True)
    for k, identity in enumerate(ids):
        parts.setdefault(TrajectoryId(*identity), Part([], [])).steps.append(k)
    ids = zip(ends.group_id_E.tolist(), ends.sample_E.tolist(), ends.attempt_E.tolist(), strict=True)
    facts = zip(
        ids, ends.uid_E.tolist(), ends.n_steps_E.tolist(), ends.stop_reason_E, ends.reward_E.tolist(), strict=True
    )
    for identity, uid, n_steps, stop_reason, reward in facts:
        of = TrajectoryId(*identity)
        end = TrajectoryEnd(of, ends.uids[uid], n_steps, ends.stop_reasons[stop_reason], reward)
        parts.setdefault(of, Part([], [])).ends.append(end)
    return parts


def _group(
    ledger: Ledger, message: StepGroup, of: TrajectoryId, part: Part, columns: _Columns
) -> Group | Refusal | None:
    """The group that the items belong to; None when they came too late: it ended, or was used before."""
    if not 0 <= of.group_id < ledger.state.next_group_id:
        return Refusal(RefusalReason.UNKNOWN_GROUP, str(of), of.group_id)
    if not 0 <= of.sample < ledger.state.n_samples:
        return Refusal(RefusalReason.IDENTITY, str(of), of.sample)
    group = ledger.state.groups.get(of.group_id)
    if group is None or not group.trajectories:
        return None
    uids, codes = message.steps.uids, columns.uid
    if any(uids[codes[k]] != group.uid for k in part.steps) or any(end.prompt_uid != group.uid for end in part.ends):
        return Refusal(RefusalReason.IDENTITY, f"{of}/prompt_uid")
    trajectory = group.trajectories[of.sample]
    if trajectory.given_up or of.attempt < trajectory.attempt:
        return None
    holder = (trajectory.generator, trajectory.incarnation)
    if of.attempt > trajectory.attempt or holder != (message.sender.generator, message.sender.incarnation):
        return Refusal(RefusalReason.IDENTITY, f"{of}/attempt", of.attempt)
    return group


def _add(made: Plan, case: _Case) -> Refusal | None:
    """Add what is new for one trajectory to the plan."""
    end = _new_end(case)
    steps = _new_steps(case)
    if isinstance(end, Refusal) or isinstance(steps, Refusal):
        return end if isinstance(end, Refusal) else steps  # type: ignore[return-value]
    if end is None and not steps:
        return None
    columns, known = case.columns, case.trajectory
    indices = tuple(columns.index[k] for k in steps)
    n_steps = known.n_steps if end is None else end.n_steps
    highest = max((*indices, *known.indices), default=-1)
    if n_steps is not None and highest >= n_steps:
        return Refusal(RefusalReason.STEP_ORDER, f"{case.id}/step={highest}", n_steps)
    n_tokens = sum(columns.offsets[k + 1] - columns.offsets[k] for k in steps)
    fresh = Fresh(
        case.id.group_id,
        case.id.sample,
        indices,
        tokens=sum(columns.sampled[k] for k in steps),
        bad_tokens=sum(columns.bad[k] for k in steps),
        n_bytes=item_bytes(n_tokens, columns.bytes_per_token, len(steps) + (end is not None)),
        n_steps=None if end is None else end.n_steps,
    )
    chain = _extended(case, steps)
    if n_steps == len(indices) + len(known.indices):
        refused = _whole_refusal(case, steps, end, fresh, chain)
        if refused is not None:
            return refused
        chain = None
    made.fresh.append(fresh)
    made.chains[case.id.group_id, case.id.sample] = chain
    kept = made.parts.setdefault(case.id.group_id, Part([], []))
    kept.steps.extend(steps)
    kept.ends.extend([end] if end is not None else [])
    return None


def failed(ledger: Ledger, message: StepGroup) -> Iterator[tuple[int, int, str]]:
    """(group_id, sample, stop reason) of current attempts that the message says have failed; looks when it is asked."""
    if FAILURES.isdisjoint(message.ends.stop_reasons):
        return
    held = ledger.held[message.sender.generator]
    for end in end_objects(message.ends):
        group_id, sample, attempt = end.trajectory
        if end.stop_reason in FAILURES and (group_id, sample) in held:
            trajectory = ledger.state.groups[group_id].trajectories[sample]
            if (trajectory.attempt, trajectory.incarnation) == (attempt, message.sender.incarnation):
                yield group_id, sample, end.stop_reason


def _new_end(case: _Case) -> TrajectoryEnd | Refusal | None:
    """The trajectory's end when it is new; an identical repetition is none, nor is the end of a failed attempt."""
    known = case.store.end_of(case.id.group_id, case.id.sample)
    new = None
    for end in case.part.ends:
        if end.stop_reason in FAILURES:
            continue
        if known is not None and end != known:
            return Refusal(RefusalReason.CONFLICT, f"{case.id}/end", end.n_steps)
        if known is None:
            new = known = end
    return new


def _new_steps(case: _Case) -> list[int] | Refusal:
    """The items of steps that are new, by index; repetitions that mean the same are not, in whatever form."""
    new: dict[int, int] = {}
    prefixes = cache(lambda: _index(case))
    for k in case.part.steps:
        index = case.columns.index[k]
        known: tuple[Steps, int] | None
        if index in new:
            known = case.message.steps, new[index]
        elif index in case.trajectory.indices:
            known = case.store.step(case.id.group_id, case.id.sample, index)
        else:
            new[index] = k
            continue
        if known is None:
            continue  # its group was used, and its data is no longer in memory
        same = same_step(*known, case.message.steps, k, lambda step: prefixes().tokens(step))
        if same is None:
            return Refusal(RefusalReason.PREFIX, f"{case.id}/step={index}: extends unknown steps, twice", index)
        if not same:
            return Refusal(RefusalReason.CONFLICT, f"{case.id}/step={index}", index)
    return [new[index] for index in sorted(new)]


def _index(case: _Case) -> PrefixIndex:
    """The trajectory's steps, those that are kept and those that come now."""
    kept = case.store.steps_of(case.id.group_id, case.id.sample)
    table = concat_steps([select(case.message.steps, np.array(case.part.steps, np.int64)), *kept])
    return index_of_steps(table, np.argsort(table.index_K, kind="stable").tolist())


def _version_refusal(ledger: Ledger, steps: Steps, current: list[tuple[list[int], Group]]) -> Refusal | None:
    """Every sampled token's version was published, and not before its group was admitted."""
    admitted_K = np.full(len(steps), -1, np.int64)
    for items, group in current:
        admitted_K[items] = group.admitted.pack()
    looked_at_N = steps.loss_mask_N & np.repeat(admitted_K >= 0, np.diff(steps.offsets_K))
    versions_N = np.where(looked_at_N, steps.versions_N, ledger.history.current.pack())
    wrong_N = ~ledger.history.known(versions_N) | (versions_N < np.repeat(admitted_K, np.diff(steps.offsets_K)))
    if not wrong_N.any():
        return None
    n = int(wrong_N.argmax())
    return Refusal(RefusalReason.VERSION, f"versions_N[{n}]", int(versions_N[n]))


def _extended(case: _Case, steps: list[int]) -> Chain | None:
    """The trajectory's chain with the new steps; None when they are not the next ones, or branch, or do not fit."""
    columns = case.columns
    chain = case.store.chain_of(case.id.group_id, case.id.sample)
    if chain is None and case.trajectory.indices:
        return None
    for k in steps:
        extends = Extension(columns.extends[k], columns.extends_length[k], columns.extends_digest[k])
        own = columns.tokens[4 * columns.offsets[k] : 4 * columns.offsets[k + 1]]
        chain = grown(chain, columns.index[k], extends, own)
        if chain is None:
            return None
    return chain


def _whole_refusal(
    case: _Case, steps: list[int], end: TrajectoryEnd | None, fresh: Fresh, chain: Chain | None
) -> Refusal | None:
    """Why a trajectory that has its end and all its steps now is refused."""
    bad, sampled = case.trajectory.bad_tokens + fresh.bad_tokens, case.trajectory.tokens + fresh.tokens
    if bad > max(1, MAX_SHARE_NOT_FINITE * sampled):
        return Refusal(RefusalReason.LOGPROB, f"{case.id}/logprobs", bad)
    if chain is not None:
        return None
    tables = case.store.steps_of(case.id.group_id, case.id.sample)
    if steps:
        tables = [*tables, select(case.message.steps, np.array(steps, np.int64))]
    end = end or case.store.end_of(case.id.group_id, case.id.sample)
    if not tables or end is None:
        return None
    found = trajectory_refusal(concat_steps(tables), ends_table([end]))
    return None if found is None else found._replace(path=f"{case.id}/{found.path}")


def _per_step(steps: Steps, mask_N: np.typing.NDArray[np.bool_]) -> list[int]:
    """Tokens under the mask, by step."""
    before_N: Int64s = np.zeros(len(mask_N) + 1, np.int64)
    np.cumsum(mask_N, out=before_N[1:])
    counts: list[int] = np.diff(before_N[steps.offsets_K]).tolist()
    return counts
