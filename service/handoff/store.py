"""The accepted steps of the groups that may still be trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from dataclasses import fields as fields_of

import numpy as np

from service.handoff.tables import concat_ends, concat_steps, select_ends, select_steps, steps_table
from service.types import Ends, Int32s, Int64s, Steps

NO_STEPS = steps_table([])


@dataclass(slots=True)
class Held:
    """One group's accepted data: only current attempts, in the order in which it came."""

    steps: list[Steps] = field(default_factory=list)
    ends: list[Ends] = field(default_factory=list)
    n_bytes: int = 0


class Store:
    """Steps and ends by ordinal, with the bytes that they take."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._held: dict[int, Held] = {}

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._held

    def add(self, ordinal: int, steps: Steps, ends: Ends) -> None:
        """Keep more of a group."""
        held = self._held.setdefault(ordinal, Held())
        if len(steps):
            held.steps.append(steps)
        if len(ends):
            held.ends.append(ends)
        self._count(held)

    def drop(self, ordinal: int) -> None:
        """Forget a group."""
        held = self._held.pop(ordinal, None)
        if held is not None:
            self.n_bytes -= held.n_bytes

    def drop_samples(self, ordinal: int, samples: tuple[int, ...]) -> None:
        """Forget what some samples of a group had."""
        held = self._held.get(ordinal)
        if held is None:
            return
        kept_steps = [select_steps(table, _outside(table.sample_K, samples)) for table in held.steps]
        kept_ends = [select_ends(table, _outside(table.sample_E, samples)) for table in held.ends]
        held.steps = [table for table in kept_steps if len(table)]
        held.ends = [table for table in kept_ends if len(table)]
        self._count(held)

    def steps_of(self, ordinal: int, sample: int) -> list[Steps]:
        """The steps of one sample, as tables of one or more steps."""
        held = self._held.get(ordinal, Held())
        return [
            select_steps(table, index_K)
            for table in held.steps
            if len(index_K := np.flatnonzero(table.sample_K == sample).astype(np.int64))
        ]

    def ends_of(self, ordinal: int, sample: int) -> list[Ends]:
        """The end of one sample as a table of one, if it is here."""
        held = self._held.get(ordinal, Held())
        return [
            select_ends(table, index_E)
            for table in held.ends
            if len(index_E := np.flatnonzero(table.sample_E == sample).astype(np.int64))
        ]

    def whole(self, ordinal: int) -> tuple[Steps, Ends]:
        """All steps and ends of a group; its data becomes one piece."""
        held = self._held[ordinal]
        if len(held.steps) > 1:
            held.steps = [concat_steps(held.steps)]
        if len(held.ends) > 1:
            held.ends = [concat_ends(held.ends)]
        self._count(held)
        return held.steps[0] if held.steps else NO_STEPS, held.ends[0]

    def _count(self, held: Held) -> None:
        n_bytes = sum(table_bytes(table) for table in held.steps)
        self.n_bytes += n_bytes - held.n_bytes
        held.n_bytes = n_bytes


def table_bytes(steps: Steps) -> int:
    """Bytes of a table's arrays."""
    values = (getattr(steps, f.name) for f in fields_of(steps))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def bytes_per_token(steps: Steps) -> int:
    """Bytes of one token over all token columns."""
    experts, rewards = steps.routed_experts_N, steps.token_rewards_N
    return 17 + (4 if rewards is not None else 0) + (2 * int(np.prod(experts.shape[1:])) if experts is not None else 0)


def _outside(sample_X: Int32s, samples: tuple[int, ...]) -> Int64s:
    return np.flatnonzero(~np.isin(sample_X, samples)).astype(np.int64)
