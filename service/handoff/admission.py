"""Admission: how much work may be open. Back-pressure and staleness are this one place.

A group's slot is its rank by admission among groups that did not vacate theirs. With mini-batches of B groups, slot s
belongs to mini-batch floor(s / B), and is admitted once the claiming engine serves version floor(s / B) - lookahead:

    B = 2, lookahead = 1, the engine serves version 0:  slots 0 1 | 2 3 are admitted, slot 4 waits for version 1
"""

from __future__ import annotations

from service.config.tree import Config
from service.errors import ConfigError
from service.handoff.journal.journal import Journal
from service.handoff.ledger.ledger import Ledger
from service.handoff.lookahead import Lookahead
from service.handoff.verbs import WaitReason
from service.types import PolicyVersion

BYTES_PER_TOKEN = 21
"""Token id, log-probability, mask, version, reward."""
BYTES_PER_STEP = 4096
"""Columns of one step and its share of a message's header and of the journal's frames; generous."""
EVENT_BYTES = 1 << 20
"""Room on the disk for events, so that leases go on when the disk is full."""


class Admission:
    """Whether the next slot may be issued."""

    def __init__(self, config: Config, lookahead: Lookahead) -> None:
        self._lookahead = lookahead
        self._mini_batch_size = config.trainer.mini_batch_size
        self._n_samples = config.algorithm.n_samples_per_prompt
        self._max_bytes = config.buffer.max_bytes
        self._max_journal_bytes = config.buffer.max_journal_bytes
        self.worst_group_bytes = worst_group_bytes(config)
        if self._mini_batch_size * self.worst_group_bytes > self._max_bytes:
            raise ConfigError(
                f"buffer.max_bytes is {self._max_bytes}, but one mini-batch may need {self._mini_batch_size} groups of "
                f"{self.worst_group_bytes} bytes at worst: the trainer would wait forever. Raise max_bytes, or lower "
                "max_group_bytes, the length limits or trainer.mini_batch_size"
            )

    def reserved(self, ledger: Ledger, stored_bytes: int) -> int:
        """Bytes of what is stored and of what open trajectories may still need at worst."""
        return stored_bytes + self._unfinished(ledger) * self.worst_group_bytes // self._n_samples

    def _worst_journal_bytes(self, ledger: Ledger) -> int:
        """Bytes that the journal may grow by when the next group is issued too."""
        return (self._unfinished(ledger) + self._n_samples) * self.worst_group_bytes // self._n_samples + EVENT_BYTES

    def disk_wait(self, ledger: Ledger, journal: Journal) -> tuple[WaitReason, str] | None:
        """Why the next slot has to wait for the disk; None when the group's steps have their place there."""
        worst = self._worst_journal_bytes(ledger)
        held = journal.position - journal.start
        if held + worst > self._max_journal_bytes:
            limit = f"buffer.max_journal_bytes is {self._max_journal_bytes}"
            return WaitReason.DISK, f"the journal holds {held} bytes and may need {worst} more, {limit}"
        if not journal.reserve(worst):
            return WaitReason.DISK, f"{journal.folder} has no room for {worst} more bytes"
        return None

    def wait(self, ledger: Ledger, serving: PolicyVersion, stored_bytes: int) -> tuple[WaitReason, str] | None:
        """Why the next slot has to wait; None when it may go to an engine that serves `serving`."""
        batch = ledger.next_slot // self._mini_batch_size
        ahead = self._lookahead.value
        if batch > effective_step(ledger, serving) + ahead:
            self._lookahead.blocked()
            detail = f"slot {ledger.next_slot} is for version {batch}: with lookahead {ahead} the engine has "
            return WaitReason.LOOKAHEAD, f"{detail}to serve version {batch - ahead}, it serves {serving}"
        needed = self.reserved(ledger, stored_bytes) + self.worst_group_bytes
        if needed > self._max_bytes:
            return (
                WaitReason.BYTES,
                f"one more group may need {needed} bytes in all, buffer.max_bytes is {self._max_bytes}",
            )
        return None

    def _unfinished(self, ledger: Ledger) -> int:
        """Trajectories that may still bring steps."""
        held = sum(len(keys) for keys in ledger.held.values())
        return held + sum(len(samples) for samples in ledger.unassigned.values())


def effective_step(ledger: Ledger, version: PolicyVersion) -> int:
    """The version's step on the current history: after a trainer went back, at most the step that it went on from."""
    return min([version.step, *(went_on for _, went_on in ledger.state.branches[version.incarnation :])])


def worst_group_bytes(config: Config) -> int:
    """Bytes that one group's steps take at worst."""
    per_turn = (config.generator.max_input_length + config.generator.max_generate_length) * BYTES_PER_TOKEN
    turns = config.algorithm.n_samples_per_prompt * config.env.max_turns
    return min(turns * (per_turn + BYTES_PER_STEP), config.buffer.max_group_bytes)
