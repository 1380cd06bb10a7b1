"""What the buffer knows and a message alone does not: identity, attempts, versions, duplicates, whole prefixes.

`plan` only looks; it changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.handoff.events import Fresh
from service.handoff.ledger import Ledger
from service.handoff.lifecycle import USED, Group, Trajectory
from service.handoff.store import Store, bytes_per_token
from service.handoff.tables import concat_steps, end_objects, select_ends, select_steps, step_objects
from service.handoff.validate import trajectory_refusal
from service.types import Int64s, Refusal, RefusalReason, Step, StepGroup, Steps, TrajectoryId


class Part(NamedTuple):
    """What a message brings for one trajectory."""

    steps: list[int]
    """Items of the message's steps."""
    ends: list[int]
    """Items of the message's ends."""


class Plan(NamedTuple):
    """What accepting a message would change."""

    fresh: tuple[Fresh, ...]
    steps: dict[int, list[int]]
    """Items of the message's steps to keep, by ordinal."""
    ends: dict[int, list[int]]
    """Items of the message's ends to keep, by ordinal."""
    superseded: tuple[int, ...]
    """Ordinals for which the message came too late."""


def plan(ledger: Ledger, store: Store, message: StepGroup) -> Plan | Refusal:
    """What accepting a message would change, or why it cannot be accepted as a whole."""
    made = Plan((), {}, {}, ())
    counts_K = _sampled_tokens(message.steps)
    for trajectory_id, part in _parts(message).items():
        standing = _standing(ledger, message, trajectory_id, part)
        if isinstance(standing, Refusal):
            return standing
        if standing is None:
            made = made._replace(superseded=(*made.superseded, trajectory_id.ordinal))
            continue
        fresh = _fresh(ledger, store, message, trajectory_id, part, standing, counts_K)
        if isinstance(fresh, Refusal):
            return fresh
        news, kept = fresh
        if kept.steps or kept.ends:
            made.steps.setdefault(trajectory_id.ordinal, []).extend(kept.steps)
            made.ends.setdefault(trajectory_id.ordinal, []).extend(kept.ends)
            made = made._replace(fresh=(*made.fresh, news))
    return made._replace(superseded=tuple(dict.fromkeys(made.superseded)))


def _parts(message: StepGroup) -> dict[TrajectoryId, Part]:
    """The message's items by trajectory; they may interleave."""
    parts: dict[TrajectoryId, Part] = {}
    steps, ends = message.steps, message.ends
    ids = zip(steps.ordinal_K.tolist(), steps.sample_K.tolist(), steps.attempt_K.tolist(), strict=True)
    for k, identity in enumerate(ids):
        parts.setdefault(TrajectoryId(*identity), Part([], [])).steps.append(k)
    ids = zip(ends.ordinal_E.tolist(), ends.sample_E.tolist(), ends.attempt_E.tolist(), strict=True)
    for e, identity in enumerate(ids):
        parts.setdefault(TrajectoryId(*identity), Part([], [])).ends.append(e)
    return parts


def _standing(ledger: Ledger, message: StepGroup, trajectory_id: TrajectoryId, part: Part) -> Group | Refusal | None:
    """The group that the items belong to; None when they came too late to be used."""
    ordinal, sample, attempt = trajectory_id
    path = str(trajectory_id)
    if not 0 <= ordinal < ledger.state.next_ordinal:
        return Refusal(RefusalReason.UNKNOWN_GROUP, path, ordinal)
    if not 0 <= sample < ledger.state.n_samples:
        return Refusal(RefusalReason.IDENTITY, path, sample)
    group = ledger.state.groups.get(ordinal)
    if group is None or group.state in USED:
        return None
    uids = {message.steps.uids[message.steps.uid_K[k]] for k in part.steps}
    uids |= {message.ends.uids[message.ends.uid_E[e]] for e in part.ends}
    if uids != {group.uid}:
        return Refusal(RefusalReason.IDENTITY, f"{path}/prompt_uid")
    trajectory = group.trajectories[sample]
    if attempt < trajectory.attempt:
        return None
    holder = (trajectory.generator, trajectory.epoch)
    if attempt > trajectory.attempt or holder != (message.sender.generator, message.sender.epoch):
        return Refusal(RefusalReason.IDENTITY, f"{path}/attempt", attempt)
    return group


def _fresh(
    ledger: Ledger, store: Store, message: StepGroup, of: TrajectoryId, part: Part, group: Group, counts_K: Int64s
) -> tuple[Fresh, Part] | Refusal:
    """What is new for one trajectory."""
    trajectory = group.trajectories[of.sample]
    ends = _new_ends(store, message, of, part)
    if isinstance(ends, Refusal):
        return ends
    steps = _new_steps(store, message, of, part, trajectory)
    if isinstance(steps, Refusal):
        return steps
    index_K = message.steps.index_K
    indices = tuple(int(index_K[k]) for k in steps)
    n_steps = int(message.ends.n_steps_E[ends[0]]) if ends else None
    known_steps = trajectory.n_steps if n_steps is None else n_steps
    highest = max((*indices, *trajectory.indices), default=-1)
    if known_steps is not None and highest >= known_steps:
        return Refusal(RefusalReason.STEP_ORDER, f"{of}/step={highest}", known_steps)
    refusal = _version_refusal(ledger, message.steps, steps, group)
    if refusal is None and known_steps == len(indices) + len(trajectory.indices):
        refusal = _whole_refusal(store, message, Part(steps, ends), of)
    if refusal is not None:
        return refusal
    lengths_K = np.diff(message.steps.offsets_K)
    n_bytes = sum(int(lengths_K[k]) for k in steps) * bytes_per_token(message.steps)
    tokens = sum(int(counts_K[k]) for k in steps)
    return Fresh(of.ordinal, of.sample, indices, tokens, n_bytes, n_steps), Part(steps, ends)


def _new_ends(store: Store, message: StepGroup, of: TrajectoryId, part: Part) -> list[int] | Refusal:
    """The item of the end when it is new; an identical repetition is none."""
    known = [end for table in store.ends_of(of.ordinal, of.sample) for end in end_objects(table)]
    new: list[int] = []
    for e in part.ends:
        end = end_objects(select_ends(message.ends, np.array([e], np.int64)))[0]
        if known and end != known[0]:
            return Refusal(RefusalReason.CONFLICT, f"{of}/end", end.n_steps)
        if not known:
            new, known = [e], [end]
    return new


def _new_steps(
    store: Store, message: StepGroup, of: TrajectoryId, part: Part, trajectory: Trajectory
) -> list[int] | Refusal:
    """The items of steps that are new; identical repetitions are not."""
    new: dict[int, int] = {}
    for k in part.steps:
        index = int(message.steps.index_K[k])
        known: Step | None
        if index in new:
            known = _step(message.steps, new[index])
        elif index in trajectory.indices:
            known = _stored(store, of, index)
        else:
            new[index] = k
            continue
        if known is not None and not _same_step(known, _step(message.steps, k)):
            return Refusal(RefusalReason.CONFLICT, f"{of}/step={index}", index)
    return list(new.values())


def _step(steps: Steps, k: int) -> Step:
    return step_objects(select_steps(steps, np.array([k], np.int64)))[0]


def _stored(store: Store, of: TrajectoryId, index: int) -> Step | None:
    """An accepted step; None when its group was trained and its data is no longer in memory."""
    for table in store.steps_of(of.ordinal, of.sample):
        for step in step_objects(table):
            if step.index == index:
                return step
    return None


def _same_step(a: Step, b: Step) -> bool:
    """Whether two steps say the same, bit by bit (so that a NaN equals itself)."""
    arrays = ("prompt_ids", "response_ids", "logprobs", "loss_mask", "versions", "reward", "routed_experts")
    return (a.extends, a.temperature, a.stop_reason) == (b.extends, b.temperature, b.stop_reason) and all(
        np.asarray(getattr(a, name)).tobytes() == np.asarray(getattr(b, name)).tobytes()
        if getattr(a, name) is not None and getattr(b, name) is not None
        else getattr(a, name) is getattr(b, name)
        for name in arrays
    )


def _version_refusal(ledger: Ledger, steps: Steps, items: list[int], group: Group) -> Refusal | None:
    """Every sampled token's version was published, and not before the group was admitted."""
    for k in items:
        span = slice(int(steps.offsets_K[k]), int(steps.offsets_K[k + 1]))
        versions_T = steps.versions_N[span][steps.loss_mask_N[span]]
        wrong = ~ledger.history.known(versions_T) | (versions_T < group.admitted.pack())
        if wrong.any():
            first = int(versions_T[wrong.argmax()])
            return Refusal(RefusalReason.VERSION, f"steps[{k}].versions", first)
    return None


def _whole_refusal(store: Store, message: StepGroup, new: Part, of: TrajectoryId) -> Refusal | None:
    """Why a trajectory that has all its steps now is no whole; a trajectory without steps always is one."""
    steps = store.steps_of(of.ordinal, of.sample)
    if new.steps:
        steps = [*steps, select_steps(message.steps, np.array(new.steps, np.int64))]
    ends = (
        [select_ends(message.ends, np.array(new.ends, np.int64))] if new.ends else store.ends_of(of.ordinal, of.sample)
    )
    found = trajectory_refusal(concat_steps(steps), ends[0]) if steps else None
    return None if found is None else found._replace(path=f"{of}/{found.path}")


def _sampled_tokens(steps: Steps) -> Int64s:
    """Tokens of each step that the policy sampled."""
    before_N = np.zeros(len(steps.loss_mask_N) + 1, np.int64)
    np.cumsum(steps.loss_mask_N, out=before_N[1:])
    return np.diff(before_N[steps.offsets_K])
