"""The handoff: everything between a generator's steps and a trainer's mini-batch, without Ray (see docs/library.md)."""

from service.handoff.batch import (
    BatchSettings,
    CompleteGroup,
    batch_of_rank,
    form_mini_batch,
    mini_batch_boundaries,
)
from service.handoff.groups import complete_groups
from service.handoff.merge import merge_steps
from service.handoff.score import advantages
from service.handoff.versions import VersionHistory

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
]
