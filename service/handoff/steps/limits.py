"""Limits on a message of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from service.columns import NO_BYTE
from service.handoff.group_bytes import NOTE_BYTES


class Routing(NamedTuple):
    """Shape and type of the records of routed experts that the model can replay, that is, use instead of its own
    routing; all fields are 0 or empty for a model without experts."""

    layers: tuple[int, ...]
    """The allowed numbers of layers in a record: all layers of the model, or only the layers with experts."""
    topk: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a record of routed experts: uint8 if it can hold all expert numbers and -1
        (`service.columns.widened`), else int16."""
        return np.dtype(np.uint8 if self.experts <= NO_BYTE + (self.topk > 1) else np.int16)

    @property
    def token_bytes(self) -> int:
        """Maximum bytes of the routed experts of one token."""
        return max(self.layers, default=0) * self.topk * self.dtype.itemsize


NO_ROUTING = Routing((), 0, 0)


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
    """Maximum bytes of one message (a `StepGroup`)."""
    max_note_bytes: int = NOTE_BYTES
    needs_logprobs: bool = True
    n_named_roles: int = 0
    """Number of roles that the configuration names."""
    routing: Routing | None = None
    """Shape and type of the routed experts that the model can replay; None if unknown: then records are not checked."""
