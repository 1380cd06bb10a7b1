"""Finds the new content of a message; checks identity, attempts, versions, duplicates and completeness.

    accepted   group=7/sample=0: steps 0 and 1
    message    group=7/sample=0: steps 1 and 2, end record     ->     one Addition: step 2 and the end record

The ledger is not changed here. Columns are read once for the whole message.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.columns import nested_offsets, offsets_of, select
from service.handoff.group_bytes import ITEM_BYTES
from service.handoff.ledger.events import Addition
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.record import GroupData, Store
from service.handoff.ledger.state import Attempt, Group
from service.handoff.prefixes.sharing import PrefixError, check_references
from service.handoff.steps.tables import end_objects, ends_table, said_bytes, same_step, trajectory_ids
from service.handoff.steps.values import FAILURES
from service.types import Bools, Refusal, RefusalReason, StepGroup, Steps, TrajectoryEnd, TrajectoryId

MAX_FRACTION_NOT_FINITE = 0.01
"""Maximum fraction of a trajectory's sampled tokens that may have a log-probability that is not finite."""


class NewContent(NamedTuple):
    """What a message adds to the content that was accepted before."""

    additions: list[Addition]
    late: tuple[TrajectoryId, ...]
    """Trajectories whose content in the message came too late."""

    def only(self, message: StepGroup, message_bytes: int) -> StepGroup:
        """The message for the journal: without content that was not checked (repeated or late), and without unused
        names, for which no bytes are reserved. It may be `message` itself."""
        n_new = sum(len(new.items) + (new.end is not None) for new in self.additions)
        counted = sum(new.n_bytes for new in self.additions)
        if n_new == len(message.steps) + len(message.ends) and message_bytes <= counted:
            return message
        items = sorted(k for new in self.additions for k in new.items)
        ends = [new.end for new in self.additions if new.end is not None]
        return StepGroup(message.sender, select(message.steps, np.array(items, np.int64)), ends_table(ends))


class _Columns:
    """A message's step columns as lists, with counts of each step's tokens."""

    def __init__(self, steps: Steps, bytes_per_token: int) -> None:
        self.index, self.uid = steps.index_K.tolist(), steps.uid_K.tolist()
        self.sampled = _per_step(steps, steps.loss_mask_N)
        """Tokens that the policy sampled."""
        self.bad = _per_step(steps, steps.loss_mask_N & ~np.isfinite(steps.logprobs_N))
        """Sampled tokens whose log-probability is not a finite number."""
        bytes_K = np.diff(steps.offsets_K) * bytes_per_token
        if steps.support_size_N is not None and steps.support_U is not None:
            bytes_K += np.diff(nested_offsets(steps.support_size_N)[steps.offsets_K]) * steps.support_U.itemsize
        self.n_bytes = bytes_K.tolist()
        """Bytes of each step's tokens."""


class _Received(NamedTuple):
    """The content of a message about one trajectory, and what was accepted of that trajectory before."""

    id: TrajectoryId
    items: list[int]
    """Positions of the trajectory's steps in the message."""
    ends: list[TrajectoryEnd]
    trajectory: Attempt
    message: StepGroup
    columns: _Columns
    held: GroupData


def new_content(
    ledger: Ledger, store: Store, message: StepGroup, max_trajectory_bytes: int | None = None
) -> NewContent | Refusal:
    """The new content of a message, or why it is refused. A trajectory beyond `max_trajectory_bytes` is refused; None,
    for a replay of the journal, sets no bound."""
    experts_N = message.steps.routed_experts_N
    if experts_N is not None and len(message.steps) and ledger.state.routing not in (None, experts_N.shape[1:]):
        path = f"routed_experts_N: {experts_N.shape[1:]}, not {ledger.state.routing}"
        return Refusal(RefusalReason.LENGTH_MISMATCH, path)
    additions: list[Addition] = []
    columns = _Columns(message.steps, store.token_bytes(message.steps))
    late: list[TrajectoryId] = []
    current: list[tuple[list[int], Group]] = []
    for of, (items, ends) in items_by_trajectory(message).items():
        uids = {message.steps.uids[columns.uid[k]] for k in items} | {end.prompt_uid for end in ends}
        group = _group(ledger, message, of, uids)
        if isinstance(group, Refusal):
            return group
        if group is None:
            late.append(of)
            continue
        current.append((items, group))
        received = _Received(of, items, ends, group.trajectories[of.sample], message, columns, store.of(of.group_id))
        addition = _addition(received)
        if isinstance(addition, Refusal):
            return addition
        if addition is not None:
            n_bytes = received.trajectory.n_bytes + addition.n_bytes
            if max_trajectory_bytes is not None and n_bytes > max_trajectory_bytes:
                return Refusal(RefusalReason.TOO_LARGE, f"{of}: buffer.max_group_bytes", n_bytes)
            additions.append(addition)
    return _version_refusal(ledger, message.steps, current) or NewContent(additions, tuple(late))


def items_by_trajectory(message: StepGroup) -> dict[TrajectoryId, tuple[list[int], list[TrajectoryEnd]]]:
    """{trajectory: (positions of its steps in the message, its end records)}."""
    found: dict[TrajectoryId, tuple[list[int], list[TrajectoryEnd]]] = {}
    for k, of in enumerate(trajectory_ids(message.steps)):
        found.setdefault(of, ([], []))[0].append(k)
    for end in end_objects(message.ends):
        found.setdefault(end.trajectory, ([], []))[1].append(end)
    return found


def _group(ledger: Ledger, message: StepGroup, of: TrajectoryId, uids: set[str]) -> Group | Refusal | None:
    """The group of a trajectory; None if this attempt has ended; a refusal if the sender may not play it."""
    if not 0 <= of.group_id < ledger.state.next_group_id:
        return Refusal(RefusalReason.UNKNOWN_GROUP, str(of), of.group_id)
    if not 0 <= of.sample < ledger.state.n_samples:
        return Refusal(RefusalReason.IDENTITY, str(of), of.sample)
    group = ledger.state.groups.get(of.group_id)
    if group is None or not group.trajectories:
        return None
    if uids != {group.uid}:
        return Refusal(RefusalReason.IDENTITY, f"{of}/prompt_uid")
    trajectory = group.trajectories[of.sample]
    if trajectory.given_up or of.attempt < trajectory.attempt:
        return None
    holder = (trajectory.generator, trajectory.incarnation)
    if of.attempt > trajectory.attempt or holder != (message.sender.generator, message.sender.incarnation):
        return Refusal(RefusalReason.IDENTITY, f"{of}/attempt", of.attempt)
    return group


def _addition(received: _Received) -> Addition | Refusal | None:
    if isinstance(end := _new_end(received), Refusal):
        return end
    if isinstance(items := _new_steps(received), Refusal):
        return items
    if end is None and not items:
        return None
    columns, known = received.columns, received.trajectory
    indices = tuple(columns.index[k] for k in items)
    n_steps = known.n_steps if end is None else end.n_steps
    highest = max((*indices, *known.indices), default=-1)
    if n_steps is not None and highest >= n_steps:
        return Refusal(RefusalReason.STEP_ORDER, f"{received.id}/step={highest}", n_steps)
    addition = Addition(
        received.id.group_id,
        received.id.sample,
        tuple(items),
        indices,
        tokens=sum(columns.sampled[k] for k in items),
        bad_tokens=sum(columns.bad[k] for k in items),
        n_bytes=sum(columns.n_bytes[k] for k in items)
        + ITEM_BYTES * len(items)
        + (ITEM_BYTES + said_bytes(end) if end else 0),
        end=end,
    )
    if n_steps != len(indices) + len(known.indices):
        return addition
    return _whole_refusal(received, addition) or addition


def _new_end(received: _Received) -> TrajectoryEnd | Refusal | None:
    """The trajectory's end record if it is new; None for a duplicate or the end record of a failed attempt."""
    known = received.held.ends.get(received.id.sample)
    new = None
    for end in received.ends:
        if end.stop_reason in FAILURES:
            continue
        if known is not None and end != known:
            return Refusal(RefusalReason.CONFLICT, f"{received.id}/end", end.n_steps)
        if known is None:
            new = known = end
    return new


def _new_steps(received: _Received) -> list[int] | Refusal:
    """The positions of new steps, in the order of step indices; steps equal to accepted steps are not new."""
    new: dict[int, int] = {}
    for k in received.items:
        index = received.columns.index[k]
        known: tuple[Steps, int] | None
        if index in new:
            known = received.message.steps, new[index]
        elif index in received.trajectory.indices:
            known = received.held.places.get(received.id.sample, {}).get(index)
        else:
            new[index] = k
            continue
        if known is None:
            continue  # its group was used, and its data is no longer in memory
        if not same_step(*known, received.message.steps, k):
            return Refusal(RefusalReason.CONFLICT, f"{received.id}/step={index}", index)
    return [new[index] for index in sorted(new)]


def _version_refusal(ledger: Ledger, steps: Steps, current: list[tuple[list[int], Group]]) -> Refusal | None:
    history, sampled_N = ledger.history, steps.versions_N[steps.loss_mask_N]
    if len(sampled_N) and (sampled_N == sampled_N[0]).all():
        number = int(sampled_N[0])
        if number in history.published and all(group.admitted.pack() <= number for _, group in current):
            return None
    admitted_K = np.full(len(steps), -1, np.int64)
    for items, group in current:
        admitted_K[items] = group.admitted.pack()
    admitted_N = np.repeat(admitted_K, np.diff(steps.offsets_K))
    versions_N = np.where(steps.loss_mask_N & (admitted_N >= 0), steps.versions_N, history.current.pack())
    wrong_N = ~history.known(versions_N) | (versions_N < admitted_N)
    if not wrong_N.any():
        return None
    n = int(wrong_N.argmax())
    return Refusal(RefusalReason.VERSION, f"versions_N[{n}]", int(versions_N[n]))


def _whole_refusal(received: _Received, addition: Addition) -> Refusal | None:
    known = received.trajectory
    bad, sampled = known.bad_tokens + addition.bad_tokens, known.tokens + addition.tokens
    if bad > max(1, MAX_FRACTION_NOT_FINITE * sampled):
        return Refusal(RefusalReason.LOGPROB, f"{received.id}/logprobs", bad)
    steps = dict(received.held.places.get(received.id.sample, {}))
    steps |= {index: (received.message.steps, k) for index, k in zip(addition.indices, addition.items, strict=True)}
    try:
        check_references(steps[index] for index in sorted(steps))
    except PrefixError as error:
        return Refusal(RefusalReason.PREFIX, str(error))
    return None


def _per_step(steps: Steps, mask_N: Bools) -> list[int]:
    counts: list[int] = np.diff(offsets_of(mask_N.view(np.int8))[steps.offsets_K]).tolist()
    return counts
