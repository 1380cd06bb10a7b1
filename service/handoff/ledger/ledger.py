"""The ledger: the state of every group, trajectory and token.

The ledger changes only by `apply`, `accept` and `renew`; the same events always give the same state. Only the record
sets `Group.first_position`, and the curriculum empties `Ledger.tried`. `tests.invariant` checks the ledger's invariant.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Sequence

from service.handoff.ledger import events
from service.handoff.ledger.events import GIVEN_UP, NEXT_STATES, UNFINISHED, USED, Addition, Fate, GroupState
from service.handoff.ledger.state import (
    MESSAGES_REMEMBERED,
    Attempt,
    Group,
    Lease,
    Member,
    State,
    Success,
    bucket,
    history_of,
)
from service.types import RefusalReason, Sender, TrajectoryId

Sample = tuple[int, int]
"""(group_id, sample)"""


class Ledger:
    """The state of the buffer, with indexes that make decisions fast."""

    def __init__(self, state: State, now: float = 0.0) -> None:
        """Every unfinished trajectory of the state counts as having made progress at `now`."""
        self.state = state
        self.history = history_of(state)
        self.finished: list[tuple[int, int]] = []
        """(number in the order of completion, group_id) of each complete group, oldest first."""
        self.slots: dict[int, None] = {}
        """Groups that no optimizer step has used yet, in order of admission."""
        self.unassigned: dict[Sample, None] = {}
        """Restarted and moved samples that wait for a claim."""
        self.since: OrderedDict[Sample, float] = OrderedDict()
        """Time of the last progress of each unfinished sample that a generator plays, oldest first."""
        self.unfinished_bytes = 0
        """Bytes of the accepted steps of unfinished samples, as `service.handoff.group_bytes` counts them."""
        self.issued_at: dict[int, float] = {}
        """Time at which each unfinished group was claimed, oldest first."""
        self.scoring: dict[int, None] = {}
        """Groups that wait for a scorer, in the order in which they were finished."""
        self.tried = set(state.successes)
        """Rows whose success changed since the curriculum last read it."""
        self.leased_at = dict.fromkeys(state.leases, now)
        self.in_state: Counter[GroupState] = Counter()
        self.unexamined: list[int] = []
        """Groups that became complete since filters and curriculum last looked (`batches.filters.examine`)."""
        for group_id, group in sorted(state.groups.items()):
            self._index(group_id, group, now)
        self.in_state[GroupState.STEPPED] += sum(groups for groups, _ in state.finals.values())
        for key, count in state.ended.items():
            self.in_state[GroupState(key.partition("/")[0])] += count

    def _index(self, group_id: int, group: Group, now: float) -> None:
        self.in_state[group.state] += 1
        if group.state in UNFINISHED:
            self.issued_at[group_id] = now
        if group.state is GroupState.COMPLETE:
            insort(self.finished, (group.finished, group_id))
            self.unexamined.append(group_id)
        if group.state is GroupState.SCORING:
            self.scoring[group_id] = None
        if group.state not in USED:
            self.slots[group_id] = None
        for sample, trajectory in enumerate(group.trajectories):
            if not trajectory.complete:
                self.unfinished_bytes += trajectory.n_bytes
                if trajectory.generator is None:
                    self.unassigned[group_id, sample] = None
                else:
                    self.since[group_id, sample] = now

    def apply(self, event: events.Event, now: float) -> None:
        """Change the state by one event: `_issued` applies `Issued`. `now`: monotonic time in seconds."""
        self._now = now
        getattr(self, f"_{type(event).__name__.lower()}")(event)

    def accept(
        self, sender: Sender, additions: Sequence[Addition], routing: tuple[int, ...] | None, now: float
    ) -> None:
        """Change the state by the new content of an accepted message."""
        _note_received(self.state.generators[sender.generator], sender.sequence)
        self.state.routing = self.state.routing or routing
        for new in additions:
            group = self.state.groups[new.group_id]
            trajectory = group.trajectories[new.sample]
            trajectory.indices.update(new.indices)
            trajectory.deaths = 0
            trajectory.tokens += new.tokens
            trajectory.bad_tokens += new.bad_tokens
            trajectory.n_bytes += new.n_bytes
            group.tokens += new.tokens
            group.n_bytes += new.n_bytes
            self.state.accepted += new.tokens
            self.state.fates[Fate.OPEN] += new.tokens
            if new.end is not None:
                trajectory.n_steps = new.end.n_steps
            self.unfinished_bytes += new.n_bytes
            if group.state is GroupState.ISSUED:
                self._enter(group, GroupState.OPEN)
            if not trajectory.complete:
                self.renew((new.group_id, new.sample), now)
                continue
            self._finish_sample((new.group_id, new.sample), trajectory)
            self.state.lengths.generated[bucket(trajectory.tokens)] += 1
            self.state.lengths.generated_tokens[bucket(trajectory.tokens)] += trajectory.tokens
            self._complete_when_all_are(new.group_id, group)

    @property
    def next_slot(self) -> int:
        """The number of the slot that the next issued group gets."""
        return self.state.next_group_id - self.state.vacated

    @property
    def unfinished(self) -> int:
        """Number of unfinished trajectories, both those that a generator plays and those that wait for a claim."""
        return len(self.since) + len(self.unassigned)

    def played_by(self, generator: str) -> list[Sample]:
        """The unfinished samples that a generator plays, sorted."""
        groups = self.state.groups
        return [(o, s) for o, s in sorted(self.since) if groups[o].trajectories[s].generator == generator]

    def renew(self, sample: Sample, now: float) -> None:
        self.since[sample] = now
        self.since.move_to_end(sample)

    def received(self, sender: Sender) -> bool:
        """Whether a message was received before; False if it is too old to be remembered."""
        member = self.state.generators[sender.generator]
        return sender.sequence < member.received_below or sender.sequence in member.received

    def plays(self, sender: Sender, of: TrajectoryId) -> bool:
        """Whether this attempt is unfinished, and this sender plays it."""
        if (of.group_id, of.sample) not in self.since:
            return False
        trajectory = self.state.groups[of.group_id].trajectories[of.sample]
        holder = (trajectory.generator, trajectory.incarnation, trajectory.attempt)
        return holder == (sender.generator, sender.incarnation, of.attempt)

    def continues(self, of: TrajectoryId) -> bool:
        """Whether this attempt is unfinished and the newest, whether or not a generator plays it now."""
        group = self.state.groups.get(of.group_id)
        if group is None or group.state not in UNFINISHED or not 0 <= of.sample < len(group.trajectories):
            return False
        trajectory = group.trajectories[of.sample]
        return trajectory.attempt == of.attempt and not trajectory.complete

    # -- members ------------------------------------------------------------------------------------------------------

    def _opened(self, event: events.Opened) -> None:
        self.state.opened = event

    def _joined(self, event: events.Joined) -> None:
        if event.role == "trainer":
            self.state.trainer_incarnation = event.incarnation
            self._go_back(event.step)
        else:
            self.state.generators[event.name] = Member(event.incarnation, resumes=event.resumes)

    def _left(self, event: events.Left) -> None:
        self.state.generators[event.generator].alive = False

    def _drained(self, event: events.Drained) -> None:
        self.state.draining = event.reason

    # -- from issue to completion -------------------------------------------------------------------------------------

    def _issued(self, event: events.Issued) -> None:
        trajectories = [Attempt(event.generator, event.incarnation) for _ in range(self.state.n_samples)]
        group = Group(event.uid, event.row, event.admitted, trajectories, scorers=event.scorers)
        self.state.groups[event.group_id] = group
        self.state.next_group_id = event.group_id + 1
        self.state.next_place = (event.group_id if event.place is None else event.place) + 1
        self._index(event.group_id, group, self._now)
        given = event.request_id, event.group_id, dict.fromkeys(range(self.state.n_samples), 0)
        self.state.generators[event.generator].note_given(*given)

    def _assigned(self, event: events.Assigned) -> None:
        group = self.state.groups[event.group_id]
        for sample in event.samples:
            trajectory = group.trajectories[sample]
            trajectory.generator, trajectory.incarnation = event.generator, event.incarnation
            self.since[event.group_id, sample] = self._now
            del self.unassigned[event.group_id, sample]
        attempts = {sample: group.trajectories[sample].attempt for sample in event.samples}
        self.state.generators[event.generator].note_given(event.request_id, event.group_id, attempts)

    def _complete_when_all_are(self, group_id: int, group: Group) -> None:
        if all(trajectory.complete for trajectory in group.trajectories):
            self.issued_at.pop(group_id)
            group.attempts = attempts_of(group)
            if group.awaited:
                self._enter(group, GroupState.SCORING)
                self.scoring[group_id] = None
            else:
                self._finish(group_id, group)

    def _finish(self, group_id: int, group: Group) -> None:
        group.finished = self.state.next_finished
        self.state.next_finished += 1
        self._enter(group, GroupState.COMPLETE)
        self.finished.append((group.finished, group_id))
        self.unexamined.append(group_id)

    def _scored(self, event: events.Scored) -> None:
        group = self.state.groups[event.group_id]
        if event.scorer not in group.awaited:  # a copy made by compaction
            return
        group.scored = (*group.scored, event.scorer)
        group.n_bytes += event.n_bytes
        group.unrewarded |= set(unrewarded(group, event.rewards or ()))
        if not group.awaited and event.group_id in self.scoring:  # not one that is unfinished
            del self.scoring[event.group_id]
            for sample in group.unrewarded:
                self._give_up(group, sample, RefusalReason.SCORER)
            self._finish(event.group_id, group)

    def _tried(self, event: events.Tried) -> None:
        group = self.state.groups[event.group_id]
        group.tried = True
        self.state.successes.setdefault(group.row, Success()).note(event.successes / event.trajectories)
        self.tried.add(group.row)

    def _moved(self, event: events.Moved) -> None:
        for sample in event.samples:
            trajectory = self.state.groups[event.group_id].trajectories[sample]
            trajectory.generator, trajectory.incarnation, trajectory.moved = None, 0, True
            trajectory.deaths += event.died
            del self.since[event.group_id, sample]
            self.unassigned[event.group_id, sample] = None

    def _restarted(self, event: events.Restarted) -> None:
        group = self.state.groups[event.group_id]
        for sample in event.samples:
            old = group.trajectories[sample]
            self._finish_sample((event.group_id, sample), old)
            group.trajectories[sample] = Attempt(None, 0, old.attempt + 1)
            group.tokens -= old.tokens
            group.n_bytes -= old.n_bytes
            self._move_tokens(Fate.OPEN, Fate.SUPERSEDED, old.tokens)
            self.unassigned[event.group_id, sample] = None
        self.state.restarts[event.reason] = self.state.restarts.get(event.reason, 0) + len(event.samples)

    def _givenup(self, event: events.GivenUp) -> None:
        group = self.state.groups[event.group_id]
        for sample in event.samples:
            trajectory = group.trajectories[sample]
            group.n_bytes -= trajectory.n_bytes
            self._finish_sample((event.group_id, sample), trajectory)
            self._give_up(group, sample, event.reason)
        self._complete_when_all_are(event.group_id, group)

    def _give_up(self, group: Group, sample: int, reason: str) -> None:
        trajectory = group.trajectories[sample]
        group.tokens -= trajectory.tokens
        self._move_tokens(Fate.OPEN, Fate.EXPIRED, trajectory.tokens)
        self.state.lengths.given_up[bucket(trajectory.tokens)] += 1
        group.trajectories[sample] = Attempt(None, 0, trajectory.attempt, given_up=True)
        self.state.given_up[reason] = self.state.given_up.get(reason, 0) + 1

    # -- ends without training ----------------------------------------------------------------------------------------

    def _ended(self, event: events.Ended) -> None:
        group = self.state.groups[event.group_id]
        for sample, trajectory in enumerate(group.trajectories):
            if not trajectory.complete:
                self._finish_sample((event.group_id, sample), trajectory)
        self.issued_at.pop(event.group_id, None)
        del self.state.groups[event.group_id]
        if group.state is GroupState.COMPLETE:
            self.finished.remove((group.finished, event.group_id))
        self._move_tokens(group.waiting_fate, Fate(event.state), group.tokens)
        self._enter(group, event.state)
        self.slots.pop(event.group_id)
        self.scoring.pop(event.group_id, None)
        self.state.vacated += 1
        self._count_end(event.state, event.reason)
        if event.filtered is not None:
            self.state.filtered += event.filtered

    # -- training -----------------------------------------------------------------------------------------------------

    def _leased(self, event: events.Leased) -> None:
        self.state.leases[event.lease] = Lease(event.trainer_incarnation, event.group_ids, self.state.filtered)
        self.state.filtered = events.GroupStats()
        self.state.next_lease = event.lease + 1
        self.leased_at[event.lease] = self._now
        columns = (event.group_ids, event.loss_tokens, event.stale_tokens, event.untrained_tokens)
        for group_id, loss, stale, untrained in zip(*columns, strict=True):
            group = self.state.groups[group_id]
            group.losses, group.stale_tokens, group.untrained = loss, stale, untrained
            group.lease_count += 1
            self._enter(group, GroupState.LEASED)
        taken = set(event.group_ids)
        self.finished = [entry for entry in self.finished if entry[1] not in taken]
        self.unexamined = [group_id for group_id in self.unexamined if group_id not in taken]

    def _released(self, event: events.Released) -> None:
        lease = self.state.leases.pop(event.lease)
        self.leased_at.pop(event.lease, None)
        self.state.filtered += lease.filtered
        for group_id in lease.group_ids:
            self._wait_again(group_id, self.state.groups[group_id])

    def _committed(self, event: events.Committed) -> None:
        lease = self.state.leases.pop(event.lease)
        self.leased_at.pop(event.lease, None)
        self.history.publish(event.version)
        self.state.step, self.state.last_commit = event.version.step, event.lease
        for group_id in lease.group_ids:
            group = self.state.groups[group_id]
            waiting = group.waiting_fate
            for fate, tokens in _used_fates(group, Fate.STEPPED):
                self._move_tokens(waiting, fate, tokens)
            # a group whose step was undone has no trajectories any more
            group.lengths = tuple(t.tokens for t in group.trajectories if not t.given_up) or group.lengths
            group.rolled_back, group.step, group.trajectories = False, event.version.step, []
            self._count_trained(group, 1)
            self._enter(group, GroupState.STEPPED)
            self.slots.pop(group_id)
        if event.final:
            used = [self.state.groups.pop(group_id) for group_id in lease.group_ids]
            self.state.finals[event.version.step] = (len(used), sum(group.loss_tokens for group in used))

    def _covered(self, event: events.Covered) -> None:
        used = [(o, group) for o, group in self.state.groups.items() if group.state in USED]
        for _, group in used:
            if group.state is GroupState.STEPPED and group.step <= event.step:
                self._move_tokens(Fate.STEPPED, Fate.TRAINED, group.loss_tokens)
                self._enter(group, GroupState.TRAINED)
        for step in [step for step in self.state.finals if step <= event.step]:
            groups, tokens = self.state.finals.pop(step)
            self._move_tokens(Fate.STEPPED, Fate.TRAINED, tokens)
            self.in_state[GroupState.STEPPED] -= groups
            self.in_state[GroupState.TRAINED] += groups
            self._count_end(GroupState.TRAINED, "", groups)
        self.state.covered = max(self.state.covered, event.step)
        for group_id, group in used:
            if group.step <= event.oldest_kept:
                del self.state.groups[group_id]
                self._count_end(GroupState.TRAINED, "")

    def _go_back(self, to_step: int) -> None:
        self.state.branches.append((self.state.step, to_step))
        self.history.rollback(to_step)
        self.state.step = to_step
        self.state.covered = min(self.state.covered, to_step)
        for group_id, group in self.state.groups.items():
            if group.state in USED and group.step > to_step:
                used = Fate.STEPPED if group.state is GroupState.STEPPED else Fate.TRAINED
                for fate, tokens in _used_fates(group, used):
                    self._move_tokens(fate, Fate.ROLLED_BACK, tokens)
                self._count_trained(group, -1)
                group.rolled_back, group.step, group.lease_count = True, 0, 0
                self._wait_again(group_id, group)
                self.slots[group_id] = None
        self.slots = dict.fromkeys(sorted(self.slots))

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _finish_sample(self, sample: Sample, trajectory: Attempt) -> None:
        self.since.pop(sample, None)
        self.unassigned.pop(sample, None)
        self.unfinished_bytes -= trajectory.n_bytes

    def _count_trained(self, group: Group, times: int) -> None:
        for tokens, loss in zip(group.lengths, group.losses, strict=True):
            self.state.lengths.trained[bucket(tokens)] += times
            self.state.lengths.loss_tokens[bucket(tokens)] += times * loss

    def _wait_again(self, group_id: int, group: Group) -> None:
        group.losses, group.stale_tokens, group.untrained = (), 0, {}
        self._enter(group, GroupState.COMPLETE)
        insort(self.finished, (group.finished, group_id))

    def _enter(self, group: Group, state: GroupState) -> None:
        if state not in NEXT_STATES.get(group.state, ()):
            raise ValueError(f"a group that is {group.state} cannot become {state}")
        self.in_state[group.state] -= 1
        self.in_state[state] += 1
        group.state = state

    def _count_end(self, state: GroupState, reason: str, groups: int = 1) -> None:
        key = f"{state}/{reason}" if reason else str(state)
        self.state.ended[key] = self.state.ended.get(key, 0) + groups

    def _move_tokens(self, source: Fate, target: Fate, tokens: int) -> None:
        self.state.fates[source] -= tokens
        self.state.fates[target] = self.state.fates.get(target, 0) + tokens  # an older journal lacks newer fates


def _used_fates(group: Group, loss: Fate) -> tuple[tuple[Fate, int], ...]:
    counted = (loss, group.loss_tokens), (Fate.STALE, group.stale_tokens), *group.untrained.items()
    return *counted, (Fate.MASKED, group.tokens - sum(tokens for _, tokens in counted))


def unrewarded(group: Group, rewards: Sequence[float]) -> list[int]:
    """The samples to which a scorer gave no reward (NaN)."""
    samples = (sample for sample, trajectory in enumerate(group.trajectories) if not trajectory.given_up)
    return [sample for sample, reward in zip(samples, rewards, strict=False) if math.isnan(reward)]


def attempts_of(group: Group) -> tuple[int, ...]:
    """The current attempt of each sample; GIVEN_UP if the group continues without the sample."""
    return group.attempts or tuple(GIVEN_UP if t.given_up else t.attempt for t in group.trajectories)


def _note_received(member: Member, sequence: int) -> None:
    member.received.add(sequence)
    while member.received_below in member.received:
        member.received.remove(member.received_below)
        member.received_below += 1
    if len(member.received) > MESSAGES_REMEMBERED:
        member.received.remove(min(member.received))
