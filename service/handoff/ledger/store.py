"""The accepted steps of the groups that may still be trained.

Steps come in messages of several groups, a few at a time; they are cut out of their message at once, so that no group
keeps another one's tokens in memory, and become one table when their group is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from service.columns import select
from service.handoff.group_bytes import table_bytes
from service.handoff.prefixes.prefix_index import PrefixIndex
from service.handoff.prefixes.sharing import Chain
from service.handoff.steps.builder import steps_table
from service.handoff.steps.tables import concat_steps, ends_table
from service.types import Ends, StepGroup, Steps, TrajectoryEnd


@dataclass(slots=True)
class Held:
    """One group's accepted data: only current attempts, in the order in which it came."""

    steps: list[Steps] = field(default_factory=list)
    ends: dict[int, TrajectoryEnd] = field(default_factory=dict)
    """By sample."""
    chains: dict[int, Chain] = field(default_factory=dict)
    """By sample, while it grows in order."""
    places: dict[int, dict[int, tuple[Steps, int]]] | None = None
    """By sample and step index, its table and its position there, in order of arrival; once somebody has asked."""
    indices: dict[int, PrefixIndex] = field(default_factory=dict)
    """By sample, once a full prompt had to be looked up."""
    n_bytes: int = 0

    def places_of(self, sample: int) -> dict[int, tuple[Steps, int]]:
        """Where the steps of one sample are, by index."""
        if self.places is None:
            self.places = {}
            for table in self.steps:
                self.note(table)
        return self.places.get(sample, {})

    def note(self, table: Steps) -> None:
        """Remember where steps are, if that is remembered."""
        if self.places is not None:
            for k, (sample, index) in enumerate(zip(table.sample_K.tolist(), table.index_K.tolist(), strict=True)):
                self.places.setdefault(sample, {})[index] = (table, k)

    def rearranged(self, steps: list[Steps]) -> None:
        """The same steps, or some of them, lie in other tables."""
        self.steps, self.places = steps, None
        self.indices.clear()


class Store:
    """Steps and ends by group_id, with the bytes that they take."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._held: dict[int, Held] = {}

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._held

    def add(self, group_id: int, steps: Steps | None, ends: Sequence[TrajectoryEnd]) -> None:
        """Keep more of a group."""
        held = self._held.setdefault(group_id, Held())
        if steps is not None:
            held.steps.append(steps)
            held.note(steps)
            n_bytes = table_bytes(steps)
            held.n_bytes += n_bytes
            self.n_bytes += n_bytes
        for end in ends:
            held.ends[end.trajectory.sample] = end

    def chain_of(self, group_id: int, sample: int) -> Chain | None:
        """How far a sample has grown in order; None when it has not, so that it is checked when it is complete."""
        held = self._held.get(group_id)
        return None if held is None else held.chains.get(sample)

    def set_chain(self, group_id: int, sample: int, chain: Chain | None) -> None:
        """Remember how far a sample has grown in order; None: it has not, or it is complete."""
        if chain is None:
            self._held[group_id].chains.pop(sample, None)
        else:
            self._held[group_id].chains[sample] = chain

    def drop(self, group_id: int) -> None:
        """Forget a group."""
        held = self._held.pop(group_id, None)
        if held is not None:
            self.n_bytes -= held.n_bytes

    def drop_samples(self, group_id: int, samples: tuple[int, ...]) -> None:
        """Forget what some samples of a group had."""
        held = self._held.get(group_id)
        if held is None:
            return
        held.chains = {sample: chain for sample, chain in held.chains.items() if sample not in samples}
        kept = [select(table, np.flatnonzero(~np.isin(table.sample_K, samples))) for table in held.steps]
        held.rearranged([table for table in kept if len(table)])
        held.ends = {sample: end for sample, end in held.ends.items() if sample not in samples}
        self.n_bytes -= held.n_bytes
        held.n_bytes = sum(table_bytes(table) for table in held.steps)
        self.n_bytes += held.n_bytes

    def samples(self, group_id: int) -> list[int]:
        """The samples of a group of which anything is here."""
        held = self._held.get(group_id, Held())
        return sorted({*held.ends, *(int(sample) for table in held.steps for sample in np.unique(table.sample_K))})

    def steps_of(self, group_id: int, sample: int) -> list[Steps]:
        """The steps of one sample, as tables of one or more steps."""
        held = self._held.get(group_id, Held())
        return [
            select(table, index_K) for table in held.steps if len(index_K := np.flatnonzero(table.sample_K == sample))
        ]

    def step(self, group_id: int, sample: int, index: int) -> tuple[Steps, int] | None:
        """The table that holds a step, and its position there."""
        held = self._held.get(group_id)
        return None if held is None else held.places_of(sample).get(index)

    def index_of(self, group_id: int, sample: int) -> PrefixIndex:
        """The steps of one sample by their prefixes, to look full prompts up."""
        held = self._held.get(group_id)
        if held is None:
            return PrefixIndex()
        index, places = held.indices.setdefault(sample, PrefixIndex()), held.places_of(sample)
        for table, k in islice(places.values(), index.count, None):
            index.arrived(table, k)
        return index

    def no_more_of(self, group_id: int, sample: int) -> None:
        """No more steps come of one sample: forget what was only kept for them."""
        if (held := self._held.get(group_id)) is not None:
            held.chains.pop(sample, None)
            held.indices.pop(sample, None)

    def end_of(self, group_id: int, sample: int) -> TrajectoryEnd | None:
        """The end of one sample, if it is here."""
        held = self._held.get(group_id)
        return None if held is None else held.ends.get(sample)

    def whole(self, group_id: int) -> tuple[Steps, Ends]:
        """All steps and ends of a complete group; its steps become one table."""
        held = self._held[group_id]
        if len(held.steps) > 1:
            held.rearranged([concat_steps(held.steps)])
        ends = [held.ends[sample] for sample in sorted(held.ends)]
        return held.steps[0] if held.steps else steps_table([]), ends_table(ends)


def cut(message: StepGroup, items: Sequence[int]) -> Steps | None:
    """Some steps of a message, in its order; they share no memory with it unless they are all that it has."""
    steps, items = message.steps, sorted(items)
    if not items:
        return None
    if len(items) == len(steps):
        return steps
    return select(steps, np.array(items, np.int64), copy=True)
