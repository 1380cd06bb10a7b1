"""The ledger: where every group, trajectory and token stands.

It changes only by `apply`; the same events make the same ledger, at any time. The invariant that must hold after every
event is `service.handoff.ledger.invariant.violations`.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import xxhash

from service.handoff.ledger import events
from service.handoff.ledger.lifecycle import NEXT_STATES, USED, Fate, GroupState
from service.handoff.ledger.state import FilteredStats, Group, Lease, Member, State, Trajectory
from service.handoff.ledger.versions import VersionHistory
from service.types import PolicyVersion, Sender, TrajectoryId

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


class Ledger:
    """The state, with the indexes that make decisions cheap."""

    def __init__(self, n_samples: int) -> None:
        self.state = State(n_samples)
        self.history = VersionHistory()
        self.finished: list[tuple[int, int]] = []
        """(place in the order of completion, group_id) of each complete group, oldest first."""
        self.slots: dict[int, None] = {}
        """Groups not yet used, in order of admission."""
        self.unassigned: dict[int, set[int]] = {}
        """Restarted samples that wait for a claim, by group_id."""
        self.held: dict[str, set[tuple[int, int]]] = {}
        """Unfinished (group_id, sample) of each generator."""
        self.steps: dict[int, list[int]] = {}
        """Groups that each optimizer step used."""
        self.in_state: Counter[GroupState] = Counter()
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            events.Opened: self._opened,
            events.Joined: self._joined,
            events.Left: self._left,
            events.Issued: self._issued,
            events.Assigned: self._assigned,
            events.StepsAccepted: self._accepted,
            events.Restarted: self._restarted,
            events.Truncated: self._truncated,
            events.Filtered: self._filtered,
            events.Refused: lambda event: self._end(event.group_id, GroupState.REFUSED, event.reason),
            events.Expired: lambda event: self._end(event.group_id, GroupState.EXPIRED, event.reason),
            events.Leased: self._leased,
            events.Committed: self._committed,
            events.Released: self._released,
            events.Covered: self._covered,
            events.Drained: self._drained,
        }

    @staticmethod
    def restored(snapshot: bytes) -> Ledger:
        """The ledger that a snapshot was taken of."""
        state = _decoder.decode(snapshot)
        ledger = Ledger(state.n_samples)
        ledger.state = state
        ledger._index()
        return ledger

    def snapshot(self) -> bytes:
        """The whole state as bytes."""
        return _encoder.encode(self.state)

    def apply(self, event: events.Journalled | events.StepsAccepted) -> None:
        """Change the state by one event."""
        self._handlers[type(event)](event)

    @property
    def next_slot(self) -> int:
        """The slot that the next issued group gets."""
        return self.state.next_group_id - self.state.vacated

    @property
    def frontier(self) -> int:
        """The smallest group_id of a group that has not ended."""
        return min(self.state.groups, default=self.state.next_group_id)

    def plays(self, sender: Sender, of: TrajectoryId) -> bool:
        """Whether the sender holds this attempt, unfinished, now."""
        if (of.group_id, of.sample) not in self.held[sender.generator]:
            return False
        trajectory = self.state.groups[of.group_id].trajectories[of.sample]
        return (trajectory.attempt, trajectory.incarnation) == (of.attempt, sender.incarnation)

    def digest(self) -> str:
        """A fingerprint of the whole state."""
        plain = msgspec.to_builtins(self.state, str_keys=True, order="deterministic")
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(plain))

    def _opened(self, event: events.Opened) -> None:
        self.state.opened = event

    # -- members ------------------------------------------------------------------------------------------------------

    def _joined(self, event: events.Joined) -> None:
        if event.role == "trainer":
            self.state.trainer_incarnation = event.incarnation
            self._go_back(event.step)
        else:
            self.state.generators[event.name] = Member(event.incarnation)
            self.held.setdefault(event.name, set())

    def _left(self, event: events.Left) -> None:
        self.state.generators[event.generator].alive = False

    # -- from issue to completion -------------------------------------------------------------------------------------

    def _issued(self, event: events.Issued) -> None:
        trajectories = [Trajectory(event.generator, event.incarnation) for _ in range(self.state.n_samples)]
        self.state.groups[event.group_id] = Group(event.uid, event.row, event.admitted, trajectories)
        self.state.next_group_id = event.group_id + 1
        self.in_state[GroupState.ISSUED] += 1
        self.slots[event.group_id] = None
        attempts = dict.fromkeys(range(self.state.n_samples), 0)
        self.held[event.generator].update((event.group_id, sample) for sample in attempts)
        self.state.generators[event.generator].note_given(event.request_id, event.group_id, attempts)

    def _assigned(self, event: events.Assigned) -> None:
        group = self.state.groups[event.group_id]
        for sample in event.samples:
            group.trajectories[sample].generator = event.generator
            group.trajectories[sample].incarnation = event.incarnation
            self.held[event.generator].add((event.group_id, sample))
        self._no_longer_unassigned(event.group_id, event.samples)
        attempts = {sample: group.trajectories[sample].attempt for sample in event.samples}
        self.state.generators[event.generator].note_given(event.request_id, event.group_id, attempts)

    def _accepted(self, event: events.StepsAccepted) -> None:
        self.state.generators[event.sender.generator].note(event.sender.sequence, event.position)
        self.state.routing = self.state.routing or event.routing
        for new in event.additions:
            group = self.state.groups[new.group_id]
            trajectory = group.trajectories[new.sample]
            trajectory.indices.update(new.indices)
            trajectory.tokens += new.tokens
            trajectory.bad_tokens += new.bad_tokens
            trajectory.n_bytes += new.n_bytes
            group.tokens += new.tokens
            self.state.accepted += new.tokens
            self.state.fates[Fate.OPEN] += new.tokens
            if new.end is not None:
                trajectory.n_steps = new.end.n_steps
            if group.state is GroupState.ISSUED:
                self._enter(group, GroupState.OPEN)
            if trajectory.complete:
                self.state.lengths.note_generated(trajectory.tokens)
                self.held[event.sender.generator].discard((new.group_id, new.sample))
                self._complete_when_all_are(new.group_id, group)

    def _complete_when_all_are(self, group_id: int, group: Group) -> None:
        if all(trajectory.complete for trajectory in group.trajectories):
            group.attempts = group.current_attempts
            group.lengths = tuple(t.tokens for t in group.trajectories if not t.given_up)
            group.finished = self.state.next_finished
            self.state.next_finished += 1
            self._enter(group, GroupState.COMPLETE)
            self.finished.append((group.finished, group_id))

    def _restarted(self, event: events.Restarted) -> None:
        group = self.state.groups[event.group_id]
        for sample in event.samples:
            old = group.trajectories[sample]
            group.trajectories[sample] = Trajectory(None, 0, old.attempt + 1)
            group.tokens -= old.tokens
            self._move_tokens(Fate.OPEN, Fate.SUPERSEDED, old.tokens)
            if old.generator is not None:
                self.held[old.generator].discard((event.group_id, sample))
            self.unassigned.setdefault(event.group_id, set()).add(sample)
        self.state.restarts[event.reason] = self.state.restarts.get(event.reason, 0) + len(event.samples)

    def _truncated(self, event: events.Truncated) -> None:
        group = self.state.groups[event.group_id]
        for sample in event.samples:
            trajectory = group.trajectories[sample]
            group.tokens -= trajectory.tokens
            self._move_tokens(Fate.OPEN, Fate.EXPIRED, trajectory.tokens)
            self.state.lengths.note_given_up(trajectory.tokens)
            if trajectory.generator is not None:
                self.held[trajectory.generator].discard((event.group_id, sample))
            group.trajectories[sample] = Trajectory(None, 0, trajectory.attempt, given_up=True)
        if event.group_id in self.unassigned:
            self._no_longer_unassigned(event.group_id, event.samples)
        self.state.given_up[event.reason] = self.state.given_up.get(event.reason, 0) + len(event.samples)
        self._complete_when_all_are(event.group_id, group)

    # -- ends without training ----------------------------------------------------------------------------------------

    def _filtered(self, event: events.Filtered) -> None:
        self._end(event.group_id, GroupState.FILTERED, event.reason)
        self.state.filtered.add(FilteredStats(1, event.trajectories, event.reward_sum, int(event.passed)))

    def _end(self, group_id: int, state: GroupState, reason: str) -> None:
        group = self.state.groups.pop(group_id)
        before = group.state
        self._move_tokens(group.waiting_fate, Fate(state), group.tokens)
        self._enter(group, state)
        if before is GroupState.COMPLETE:
            self.finished.remove((group.finished, group_id))
        self.slots.pop(group_id)
        for sample, trajectory in enumerate(group.trajectories):
            if trajectory.generator is not None:
                self.held[trajectory.generator].discard((group_id, sample))
        self.unassigned.pop(group_id, None)
        self.state.vacated += 1
        self._count_end(state, reason)

    # -- training -----------------------------------------------------------------------------------------------------

    def _leased(self, event: events.Leased) -> None:
        self.state.leases[event.lease] = Lease(event.trainer_incarnation, event.group_ids, self.state.filtered)
        self.state.filtered = FilteredStats()
        self.state.next_lease = event.lease + 1
        for group_id, loss, stale in zip(event.group_ids, event.loss_tokens, event.stale_tokens, strict=True):
            group = self.state.groups[group_id]
            group.losses, group.stale_tokens = loss, stale
            group.lease_count += 1
            self._enter(group, GroupState.LEASED)
        taken = set(event.group_ids)
        self.finished = [entry for entry in self.finished if entry[1] not in taken]

    def _released(self, event: events.Released) -> None:
        lease = self.state.leases.pop(event.lease)
        self.state.filtered.add(lease.filtered)
        for group_id in lease.group_ids:
            self._wait_again(group_id, self.state.groups[group_id])

    def _committed(self, event: events.Committed) -> None:
        lease = self.state.leases.pop(event.lease)
        self.history.publish(event.version)
        self.state.step, self.state.last_commit = event.version.step, event.lease
        for group_id in lease.group_ids:
            group = self.state.groups[group_id]
            waiting = group.waiting_fate
            for fate, tokens in _used_fates(group, Fate.STEPPED):
                self._move_tokens(waiting, fate, tokens)
            group.rolled_back, group.step, group.trajectories = False, event.version.step, []
            self.state.lengths.note_trained(group.lengths, group.losses)
            self._enter(group, GroupState.STEPPED)
            self.slots.pop(group_id)
        if event.final:
            used = [self.state.groups.pop(group_id) for group_id in lease.group_ids]
            self.state.finals[event.version.step] = (len(used), sum(group.loss_tokens for group in used))
        else:
            self.steps[event.version.step] = list(lease.group_ids)

    def _covered(self, event: events.Covered) -> None:
        for step in range(self.state.covered + 1, event.step + 1):
            for group_id in self.steps.get(step, ()):
                group = self.state.groups[group_id]
                self._move_tokens(Fate.STEPPED, Fate.TRAINED, group.loss_tokens)
                self._enter(group, GroupState.TRAINED)
        for step in [step for step in self.state.finals if step <= event.step]:
            groups, tokens = self.state.finals.pop(step)
            self._move_tokens(Fate.STEPPED, Fate.TRAINED, tokens)
            self.in_state[GroupState.STEPPED] -= groups
            self.in_state[GroupState.TRAINED] += groups
            self._count_end(GroupState.TRAINED, "", groups)
        self.state.covered = max(self.state.covered, event.step)
        for step in [step for step in self.steps if step <= event.oldest_kept]:
            for group_id in self.steps.pop(step):
                del self.state.groups[group_id]
                self._count_end(GroupState.TRAINED, "")

    def _go_back(self, to_step: int) -> None:
        """Begin a new incarnation of versions at a step; the groups that later steps used wait again."""
        self.state.branches.append((self.state.step, to_step))
        self.history.rollback(to_step)
        self.state.step = to_step
        self.state.covered = min(self.state.covered, to_step)
        for step in [step for step in self.steps if step > to_step]:
            for group_id in self.steps.pop(step):
                group = self.state.groups[group_id]
                used = Fate.STEPPED if group.state is GroupState.STEPPED else Fate.TRAINED
                for fate, tokens in _used_fates(group, used):
                    self._move_tokens(fate, Fate.ROLLED_BACK, tokens)
                self.state.lengths.note_trained(group.lengths, group.losses, times=-1)
                group.rolled_back, group.step, group.lease_count = True, 0, 0
                self._wait_again(group_id, group)
                self.slots[group_id] = None
        self.slots = dict.fromkeys(sorted(self.slots))

    def _drained(self, event: events.Drained) -> None:
        self.state.draining = event.reason

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _index(self) -> None:
        """Build the indexes of a state that was read from a snapshot."""
        state = self.state
        for reached, went_on in state.branches:
            self._publish_up_to(reached)
            self.history.rollback(went_on)
        self._publish_up_to(state.step)
        self.held = {name: set() for name in state.generators}
        for group_id, group in sorted(state.groups.items()):
            self.in_state[group.state] += 1
            if group.state is GroupState.COMPLETE:
                insort(self.finished, (group.finished, group_id))
            if group.state in USED:
                self.steps.setdefault(group.step, []).append(group_id)
            else:
                self.slots[group_id] = None
            for sample, trajectory in enumerate(group.trajectories):
                if trajectory.complete:
                    continue
                if trajectory.generator is None:
                    self.unassigned.setdefault(group_id, set()).add(sample)
                else:
                    self.held[trajectory.generator].add((group_id, sample))
        self.in_state[GroupState.STEPPED] += sum(groups for groups, _ in state.finals.values())
        for key, count in state.ended.items():
            self.in_state[GroupState(key.partition("/")[0])] += count

    def _publish_up_to(self, step: int) -> None:
        current = self.history.current
        for later in range(current.step + 1, step + 1):
            self.history.publish(PolicyVersion(current.incarnation, later))

    def _wait_again(self, group_id: int, group: Group) -> None:
        group.losses, group.stale_tokens = (), 0
        self._enter(group, GroupState.COMPLETE)
        insort(self.finished, (group.finished, group_id))

    def _enter(self, group: Group, state: GroupState) -> None:
        if state not in NEXT_STATES[group.state]:
            raise ValueError(f"a group that is {group.state} cannot become {state}")
        self.in_state[group.state] -= 1
        self.in_state[state] += 1
        group.state = state

    def _count_end(self, state: GroupState, reason: str, groups: int = 1) -> None:
        key = f"{state}/{reason}" if reason else str(state)
        self.state.ended[key] = self.state.ended.get(key, 0) + groups

    def _move_tokens(self, source: Fate, target: Fate, tokens: int) -> None:
        self.state.fates[source] -= tokens
        self.state.fates[target] += tokens

    def _no_longer_unassigned(self, group_id: int, samples: Iterable[int]) -> None:
        waiting = self.unassigned[group_id]
        waiting.difference_update(samples)
        if not waiting:
            del self.unassigned[group_id]


def _used_fates(group: Group, loss: Fate) -> tuple[tuple[Fate, int], ...]:
    """The fates of a group's tokens once an optimizer step used it."""
    return (loss, group.loss_tokens), (Fate.STALE, group.stale_tokens), (Fate.MASKED, group.masked_tokens)
