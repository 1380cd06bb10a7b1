"""Estimates of what an H100 should show, from the rates of `service/learn/estimate/gpus.toml` and the operations of
the real code, which a meter counts on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.figures import Range
from benchmarks.gpu.steps import MICRO_BATCHES, configured, shape_folder
from service.learn.compile import as_on_gpu
from service.learn.estimate.gpus import H100, REACHED
from service.learn.estimate.meter import Meter
from service.learn.estimate.step import estimate_step
from service.learn.model.logprob import token_logprobs
from service.learn.model.policy_model import Checkpointing

LARGE_PRODUCTS = 796e12
"""FLOP/s of a large bfloat16 product, measured on an H100; `REACHED.products` is for products as small as a layer's."""
LAUNCHES = 0.030
"""Seconds of each micro-batch for which the GPU may wait for kernel launches of the host."""
ATTENTION = {"FA2": (330e12, 310e12), "FA4": (590e12, 570e12)}
"""FLOP/s of causal attention, forward and backward, with head size 128: means of those that were measured on an H100 in
rows of 8k and 32k."""
MEASURED = 0.15
"""Fraction by which a rate may differ from the rate that was measured before."""
SMALL, LARGE = 2, 4
"""Numbers of layers whose operations are counted; the counts of the whole model are extrapolated linearly."""


@dataclass(frozen=True)
class Step:
    """A micro-batch without checkpointing: FLOPs of the model, and seconds by kind of operation with eager layers."""

    model_flops: float
    seconds: dict[str, float]
    optimizer_seconds: float
    parameters: float

    @staticmethod
    def of(shape: dict[str, Any], parent: Path, row_tokens: int, tokens: int) -> Step:
        """Estimate a micro-batch of a model of this shape."""
        few, more = (_counted(shape | {"num_hidden_layers": n}, parent, row_tokens, tokens) for n in (SMALL, LARGE))
        share = (shape["num_hidden_layers"] - SMALL) / (LARGE - SMALL)
        kinds = few.seconds | more.seconds

        def at(get: Callable[[Step], float]) -> float:
            return get(few) + share * (get(more) - get(few))

        seconds = {kind: at(lambda step, kind=kind: step.seconds.get(kind, 0.0)) for kind in kinds}  # type: ignore[misc]
        parts = (at(lambda step: step.optimizer_seconds), at(lambda step: step.parameters))
        return Step(at(lambda step: step.model_flops), seconds, *parts)

    def range(self, compiled: bool = True) -> Range:
        """Seconds of a whole step: from no waits and the fastest kernels, to waits for launches and slower kernels."""
        passes = REACHED.fused_passes if compiled else 1.0
        slow = self.seconds | {"elementwise": self.seconds["elementwise"] * passes}
        fast = slow | {
            "products": slow["products"] * REACHED.products / LARGE_PRODUCTS,
            "attention": slow["attention"] * REACHED.attention_backward / ATTENTION["FA4"][1],
        }
        low, high = sum(fast.values()), sum(slow.values()) + LAUNCHES
        return Range(*(MICRO_BATCHES * seconds + self.optimizer_seconds for seconds in (low, high)))

    def utilisation(self, seconds: float) -> float:
        """Fraction of the peak rate, for a whole step that takes this many seconds."""
        return MICRO_BATCHES * self.model_flops / seconds / H100.flops

    def utilisations(self, compiled: bool = True) -> Range:
        """The range of `utilisation`."""
        fast, slow = self.range(compiled)
        return Range(self.utilisation(slow), self.utilisation(fast))


def _counted(shape: dict[str, Any], parent: Path, row_tokens: int, tokens: int) -> Step:
    settings = configured(row_tokens, tokens, gradient_checkpointing=False).learn
    found = estimate_step(settings, shape_folder(shape, parent), row_tokens, checkpointing=Checkpointing(0))
    return Step(found.model_flops, dict(found.seconds), found.optimizer_seconds, found.parameters)


def head_seconds(tokens: int, hidden: int, vocabulary: int, compiled: bool) -> Range:
    """Seconds per loss token of the output head, both passes. A compiled function counts as one kernel, otherwise each
    operation does."""
    meter = Meter(vocabulary, tokens)
    each: Callable[..., Any] = lambda function, *arguments: function(*arguments)  # noqa: E731
    with FakeTensorMode(), as_on_gpu(meter.one_kernel if compiled else each):
        states, head = (torch.empty(n, hidden, dtype=torch.bfloat16).requires_grad_() for n in (tokens, vocabulary))
        with meter:
            ones = torch.ones(tokens)
            found = token_logprobs(states, head, torch.zeros(tokens, dtype=torch.int64), ones)
            torch.autograd.backward([found.logprob_M, found.entropy_M], [ones, ones])
    seconds = sum(meter.seconds.values()) / tokens
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
    return Range(0.97, 1 + copied / REACHED.bandwidth / seconds)
