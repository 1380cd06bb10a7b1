"""The handoff: everything between a generator's steps and a trainer's mini-batch, without Ray."""

from service.handoff.batch import mini_batch_boundaries
from service.handoff.merge import merge_steps
from service.handoff.score import advantages

__all__ = ["advantages", "merge_steps", "mini_batch_boundaries"]
