"""Limits on a message of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from service.handoff.group_bytes import NOTE_BYTES


class Routing(NamedTuple):
    """Which routed experts a model can replay; all are 0 or empty for a model without experts."""

    layers: tuple[int, ...]
    """The numbers of layers that a record may have: all layers of the model, or only those with experts."""
    topk: int
    experts: int

    @property
    def experts_per_token(self) -> int:
        """Maximum number of routed experts that a record has for each token."""
        return max(self.layers, default=0) * self.topk


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the content of a message."""

    vocab_size: int
    max_input_length: int
    max_generate_length: int
    max_turns: int
    n_samples_per_prompt: int
    max_attempts: int
    max_group_bytes: int
    max_note_bytes: int = NOTE_BYTES
    needs_logprobs: bool = True
    n_named_roles: int = 0
    """Roles that the configuration names."""
    routing: Routing | None = None
    """The routed experts that the model can replay; None: not known, so records are not checked against the model."""
