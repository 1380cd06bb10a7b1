"""Computes LoRA adapters in a CPU engine. Consecutive rows of a batch with the same adapter form a run; a run takes two
small matrix products.

vLLM 0.32 copies the adapter's matrices A and B for each row, which takes several times as long as the model itself.
vLLM has a slot for each loaded adapter. It also applies the last slot's adapter to rows that have no adapter
(https://github.com/vllm-project/vllm/pull/48421).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform


class RowRun(NamedTuple):
    """Consecutive rows of a batch with the same adapter."""

    start: int
    stop: int
    slot: int


def runs_of(slots_N: Tensor) -> list[RowRun]:
    """Return the runs of rows with the same adapter. `slots_N`: [N] the adapter slot of each row; -1: no adapter.

    slots [1 1 -1 0] -> (start, stop, slot) of each run: [(0, 2, 1), (3, 4, 0)]
    """
    slots, lengths = torch.unique_consecutive(slots_N, return_counts=True)
    stops = lengths.cumsum(0)
    found = map(RowRun, (stops - lengths).tolist(), stops.tolist(), slots.tolist())
    return [run for run in found if run.slot >= 0]


class RunsOfRows(PunicaWrapperCPU):  # type: ignore[misc]
    """Replaces vLLM's class that computes adapters on CPUs. It computes linear layers run by run (see `RowRun`)."""

    def update_metadata(self, *mapping: Any, **more: Any) -> None:
        """Store the adapter slot of each row of the next batch."""
        super().update_metadata(*mapping, **more)
        self._runs = runs_of(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Sequence[Tensor],
        lora_b_stacked: Sequence[Tensor],
        scale: float,
        output_slices: Sequence[int],
        **unused: Any,
    ) -> None:
        """Add `scale * x @ A.T @ B.T` to each slice of y, with the matrices A and B of each row's adapter slot.

        x [N, in], y [N, sum(output_slices)], for each slice A [slots, 1, rank, in] and B [slots, 1, slice, rank].
        """
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for start, stop, slot in self._runs:
            columns = torch.split(y[start:stop], list(output_slices), dim=1)
            for a, b, column in zip(lora_a_stacked, lora_b_stacked, columns, strict=True):
                column.addmm_(x[start:stop] @ a[slot, 0].T, b[slot, 0].T, alpha=scale)


def use_runs_of_rows() -> None:
    """Make vLLM compute adapters on CPU with this module."""
    type(current_platform).get_punica_wrapper = classmethod(lambda _: f"{__name__}.{RunsOfRows.__name__}")
