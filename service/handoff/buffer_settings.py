"""The settings of the buffer; `service.config.core_settings` makes them from a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from service.handoff.attempts import AttemptSettings
from service.handoff.batches.batch import BatchSettings
from service.handoff.batches.filters import FilterSettings
from service.handoff.group_bytes import WorstBytes
from service.handoff.ledger.events import Opened
from service.handoff.prompt_order import CurriculumSettings
from service.handoff.scoring import ScorerSettings
from service.handoff.steps.values import ROLES, Limits

SYNC_SECONDS = 0.005
"""Minimum seconds between two syncs of the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSettings:
    """Settings of the buffer; each part gets the settings that it needs."""

    limits: Limits
    worst: WorstBytes
    batches: BatchSettings
    filters: FilterSettings
    attempts: AttemptSettings
    curriculum: CurriculumSettings | None = None
    scorers: Mapping[str, ScorerSettings] = field(default_factory=dict)
    seed: int = 0
    shuffle: bool = True
    """Whether each epoch has its own order of prompts, drawn with the seed; otherwise, the order of the dataset."""
    mini_batch_size: int = 16
    order: Literal["finished_first", "strict"] = "finished_first"
    max_generators: int = 1
    """Maximum number of generators that play trajectories at the same time."""
    lookahead: int = 2
    max_bytes: int = 4 << 30
    """Maximum bytes of memory for steps: a group is admitted only if the worst case of all admitted groups fits."""
    max_journal_bytes: int = 64 << 30
    lease_deadline: float = 1800.0
    """Seconds after which a lease is released."""
    max_lease_attempts: int = 3
    has_checkpoints: bool = False
    """Whether checkpoints are written, so that a trainer may go back to an earlier step."""


def opening(of: BufferSettings, uids: Sequence[str], rows_digest: str) -> Opened:
    """The first event of a journal: the rows and settings that must stay the same while the journal is used."""
    settings = {
        "run.seed": of.seed,
        "data.shuffle": int(of.shuffle),
        "algorithm.n_samples_per_prompt": of.limits.n_samples_per_prompt,
        "trainer.mini_batch_size": of.mini_batch_size,
        "the model's vocabulary": of.limits.vocab_size,
        **{f"roles.{name}": number for number, name in enumerate(of.batches.rule.named, len(ROLES))},
    }
    return Opened(xxhash.xxh3_64_hexdigest("\n".join(uids).encode()) + rows_digest, settings)
