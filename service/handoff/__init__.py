"""The handoff: everything between a generator's steps and a trainer's mini-batch, without Ray (see docs/library.md)."""

from service.handoff.batches.advantages import advantages, turn_advantages
from service.handoff.batches.batch import (
    BatchSettings,
    batch_of_rank,
    form_mini_batch,
    mini_batch_boundaries,
)
from service.handoff.batches.groups import complete_groups
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.versions import VersionHistory
from service.handoff.prefixes.merge import merge_steps

__all__ = [
    "BatchSettings",
    "CompleteGroup",
    "VersionHistory",
    "advantages",
    "batch_of_rank",
    "complete_groups",
    "form_mini_batch",
    "merge_steps",
    "mini_batch_boundaries",
    "turn_advantages",
]
