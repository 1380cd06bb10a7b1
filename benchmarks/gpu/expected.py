"""What an H100 should show: rates that were measured on one, and the operations of a model by its shape."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Range
from benchmarks.gpu.steps import MICRO_BATCHES, ROW_TOKENS, TOKENS, configured
from benchmarks.shapes import shape_folder
from service.plan.memory import GPUS, Size

H100 = GPUS["h100"]
PRODUCTS, BANDWIDTH = 750e12, 2.8e12
"""FLOP/s of products as small as a layer's, and bytes/s, in two training steps on an H100."""
LARGE_PRODUCTS = 796e12
"""FLOP/s of a large bfloat16 product, measured on an H100."""
ATTENTION = {"FA2": (330e12, 310e12), "FA4": (590e12, 570e12)}
"""FLOP/s of causal attention, forward and backward, with head size 128: means of those that were measured on an H100 in
rows of 8k and 32k."""
MEASURED = 0.15
"""Fraction by which a rate may differ from the rate that was measured before."""
UTILISATION = {"Qwen3-0.6B": Range(0.33, 0.45), "Qwen3-1.7B": Range(0.47, 0.57)}
"""Fraction of the peak rate that steps may reach: around what was measured."""
EXPERTS = Range(0.22, 0.41)
LOGIT_PASSES = {True: 6, False: 40}
"""Times that a logit of four bytes is read or written in both passes of the head, compiled or not."""


@dataclass(frozen=True)
class Step:
    """A micro-batch without recomputation."""

    model_flops: float
    parameters: int

    @staticmethod
    def of(shape: dict[str, Any], device: str) -> Step:
        """Count the FLOPs of a micro-batch of a model of this shape; half of its tokens have logits."""
        row_tokens, tokens = ROW_TOKENS[device], TOKENS[device]
        with tempfile.TemporaryDirectory() as parent:
            size = Size.of(shape_folder(shape, Path(parent)), configured(row_tokens, tokens).learn)
        attention = size.layers * size.query_width * row_tokens
        return Step(6.0 * tokens * (size.active - size.head / 2 + attention), size.parameters)

    def utilisation(self, seconds: float) -> float:
        """Fraction of the peak rate, for a whole step that takes this many seconds."""
        return MICRO_BATCHES * self.model_flops / seconds / H100.flops


def head_seconds(hidden: int, vocabulary: int, compiled: bool) -> Range:
    """Seconds per loss token of the output head, both passes: four products, and passes over the logits."""
    seconds = 8 * hidden * vocabulary / PRODUCTS + 4 * LOGIT_PASSES[compiled] * vocabulary / BANDWIDTH
    return Range((1 - 2 * MEASURED) * seconds, (1 + 3 * MEASURED) * seconds)


def attention_flops(rows: int, length: int, heads: int, head_dim: int) -> tuple[float, float]:
    """FLOPs of causal attention: two products of half a square per row in the forward pass, five in the backward."""
    forward = 2.0 * rows * heads * head_dim * length**2
    return forward, 2.5 * forward


def attention_rates(kernel: str, length: int) -> tuple[Range, Range]:
    """FLOP/s of the forward and the backward pass. Diagonal tiles of 128 x 128 are computed whole, so short rows are
    slower."""
    useful = 1 / (1 + 128 / length)
    forward, backward = ATTENTION[kernel]
    # Starting a kernel, and its last wave, which does not fill the GPU, cost time once for all rows.
    return tuple(Range(useful * rate * (1 - 3 * MEASURED), rate * (1 + MEASURED)) for rate in (forward, backward))  # type: ignore[return-value]


def sharded_over_unsharded(step: Step, seconds: float) -> Range:
    """Time of a step on a mesh of one rank over the time without sharding: the copies of FSDP2, if nothing overlaps.

    In each micro-batch a parameter is gathered twice (float32 read, bfloat16 written, copied in and out: 14 bytes), and
    its gradient is copied, reduced and added once (2 + 4, 4 + 4, 4 + 4 + 4: 26 bytes).
    """
    copied = step.parameters * MICRO_BATCHES * (2 * 14 + 26)
    return Range(0.97, 1 + copied / BANDWIDTH / seconds)
