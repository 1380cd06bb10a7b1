"""Collects steps, and the records that end trajectories, into one message to the buffer. The message keeps their order.

StepColumns().append(step), .append(step), .end(end)  --step_group(sender)-->  StepGroup
                                                      --service.handoff.steps.wire.encode-->  bytes of the message
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from service.columns import columns_of
from service.handoff.steps.tables import said_bytes, step_group, steps_table
from service.types import Sender, Step, StepGroup, Steps, TrajectoryEnd, TrajectoryId

_TOKEN_COLUMNS = {column.name[:-2]: column for column in columns_of(Steps).tokens}
_OPTIONAL = [name for name, column in _TOKEN_COLUMNS.items() if column.optional]
_OPTIONAL += [column.name[:-2] for column in columns_of(Steps).nested]
_REQUIRED_BYTES = sum(column.dtype.itemsize for column in _TOKEN_COLUMNS.values() if not column.optional)
"""Bytes of one token in all required columns."""


class StepSink(Protocol):
    """Receives steps, and the records that end trajectories. Implementations: `StepColumns`, and the outbox of a
    generator."""

    def append(self, step: Step) -> None:
        """Receive a step."""

    def end(self, end: TrajectoryEnd) -> None:
        """Receive the record that ends a trajectory."""

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Wait for the buffer's answer about the trajectory's newest step. Returns True if the buffer accepted it."""


class StepColumns:
    """The steps, and the records that end trajectories, of one message, in the order in which they were appended."""

    def __init__(self) -> None:
        self.n_bytes = 0
        """Bytes of all token columns and of the records that end trajectories."""
        self.name_bytes = 0
        """Upper bound of the bytes of uids, stop reasons, notes and infos in the message's header, each with its length
        prefix."""
        self.routing: tuple[int, ...] | None = None
        """(layers, topk) of the routed experts, which must be the same for all steps of a message."""
        self.ends: list[TrajectoryEnd] = []
        self._steps: list[Step] = []

    def __len__(self) -> int:
        return len(self._steps) + len(self.ends)

    def append(self, step: Step) -> None:
        """Append a step."""
        self._steps.append(step)
        self.n_bytes += _REQUIRED_BYTES * (len(step.prompt_ids) + len(step.response_ids))
        optional = (getattr(step, name, None) for name in _OPTIONAL)
        self.n_bytes += sum(np.asarray(values).nbytes for values in optional if values is not None)
        if self.routing is None and step.routed_experts is not None:
            self.routing = step.routed_experts.shape[1:]
        self._count_names(step.prompt_uid, step.stop_reason, step.note)

    def end(self, end: TrajectoryEnd) -> None:
        """Append the record that ends a trajectory."""
        self.ends.append(end)
        self.n_bytes += said_bytes(end)
        self._count_names(end.prompt_uid, end.stop_reason, end.info)

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Always True: steps are only collected here, and no buffer has to accept them."""
        return True

    def by_trajectory(self) -> dict[TrajectoryId, StepColumns]:
        """One `StepColumns` for each trajectory, with its steps and the record that ends it. Trajectories are in the
        order in which they first appear."""
        parts: dict[TrajectoryId, StepColumns] = {}
        for step in self._steps:
            parts.setdefault(step.trajectory, StepColumns()).append(step)
        for end in self.ends:
            parts.setdefault(end.trajectory, StepColumns()).end(end)
        return parts

    def step_group(self, sender: Sender) -> StepGroup:
        """The message with everything that was appended."""
        return step_group(sender, self._steps, self.ends)

    def steps(self) -> Steps:
        """The collected steps as columns."""
        return steps_table(self._steps)

    def _count_names(self, *names: str) -> None:
        self.name_bytes += sum(len(name.encode()) + 5 for name in names)
