"""The invariant of the ledger, which holds after every event."""

from collections import Counter

import msgspec
import xxhash

from service.handoff.ledger.events import UNFINISHED, USED, Fate, GroupState
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import Group

VACATES = (GroupState.FILTERED, GroupState.REFUSED, GroupState.EXPIRED)
"""Ends that give the group's slot back."""


def fingerprint(ledger: Ledger) -> str:
    """A fingerprint of the whole state."""
    plain = msgspec.to_builtins(ledger.state, str_keys=True, order="deterministic")
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(plain))


def violations(ledger: Ledger) -> list[str]:
    """Violations of the invariant, in words; always empty."""
    state, found = ledger.state, []
    if state.accepted != sum(state.fates.values()):
        found.append(
            f"accepted {state.accepted} tokens, but the fates sum to {sum(state.fates.values())}: {state.fates}"
        )
    if min(state.fates.values()) < 0:
        found.append(f"a fate is negative: {state.fates}")
    issued = ledger.in_state.total()
    if issued != state.next_group_id:
        found.append(f"issued {state.next_group_id} groups, but the states sum to {issued}: {ledger.in_state}")
    states = Counter(group.state for group in state.groups.values())
    states[GroupState.STEPPED] += sum(groups for groups, _ in state.finals.values())
    if any(states[s] != ledger.in_state[s] for s in GroupState if s not in (*VACATES, GroupState.TRAINED)):
        found.append(f"groups are {states}, counted as {ledger.in_state}")
    for fate in (Fate.OPEN, Fate.ROLLED_BACK):
        waiting = sum(g.tokens for g in state.groups.values() if g.state not in USED and g.waiting_fate is fate)
        if waiting != state.fates[fate]:
            found.append(f"{waiting} tokens wait as {fate}, counted are {state.fates[fate]}")
    vacated = sum(ledger.in_state[s] for s in VACATES)
    if vacated != state.vacated:
        found.append(f"{vacated} groups vacated their slots, counted are {state.vacated}")
    leased = sorted(group_id for lease in state.leases.values() for group_id in lease.group_ids)
    if leased != sorted(o for o, g in state.groups.items() if g.state is GroupState.LEASED):
        found.append(f"leases hold {leased}, which are not the leased groups")
    if [entry[1] for entry in ledger.finished] != sorted(
        (o for o, g in state.groups.items() if g.state is GroupState.COMPLETE), key=lambda o: state.groups[o].finished
    ):
        found.append("the order of completion does not hold the complete groups")
    if sorted(ledger.scoring) != sorted(
        o for o, g in state.groups.items() if g.state is GroupState.SCORING and g.awaited
    ):
        found.append("those that wait for a scorer are not the groups in that state")
    if list(ledger.slots) != sorted(o for o, g in state.groups.items() if g.state not in USED):
        found.append("the slots are not the unused groups in order of admission")
    unfinished = [*ledger.since, *ledger.unassigned]
    n_bytes = sum(state.groups[o].trajectories[sample].n_bytes for o, sample in unfinished)
    if n_bytes != ledger.unfinished_bytes:
        found.append(f"unfinished samples have {n_bytes} bytes, counted are {ledger.unfinished_bytes}")
    if len(unfinished) != sum(not t.complete for g in state.groups.values() for t in g.trajectories):
        found.append(f"{len(unfinished)} samples are played or wait for a claim, which are not the unfinished ones")
    if list(ledger.issued_at) != [o for o, g in state.groups.items() if g.state in UNFINISHED]:
        found.append("the groups with a deadline are not the unfinished ones, in order of issue")
    by_generator = {of for name in state.generators for of in ledger.played_by(name)}
    if by_generator != set(ledger.since):
        found.append("the samples of the generators are not those that are held")
    found += [
        f"group={o}: no one holds an unfinished sample" for o, g in state.groups.items() if _dropped(ledger, o, g)
    ]
    return found


def _dropped(ledger: Ledger, group_id: int, group: Group) -> bool:
    """Whether an unfinished sample of the group is neither with a generator nor waiting for one."""
    if group.state not in UNFINISHED:
        return False
    return any(
        not trajectory.complete
        and (group_id, sample) not in ledger.unassigned
        and (trajectory.generator is None or (group_id, sample) not in ledger.since)
        for sample, trajectory in enumerate(group.trajectories)
    )
