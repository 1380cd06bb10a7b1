"""The plan's bytes and seconds of a rank beside an arithmetic that shares no code with it: shapes, bytes and rates.

A rank of n, all layers checkpointed, N tokens a micro-batch in rows of T, half of which carry loss:

    bytes     16 P / n (float32 weights, gradients, two moments) + 2 N h a layer (its input) + the larger of two moments
              head   its bfloat16 weights and float32 gradient, 1 GiB of logits, their gradient, one more in two bytes
              layer  two layers in bfloat16, the gradients of one in two and in four bytes, and what it computes
    seconds   the longer of operations (products, attention, element-wise bytes) and of the ring
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.estimates import BUDGET, configured, model_folder
from service.plan.machine.device import profile
from service.plan.trainer import Trainer, estimated

ROW = 4096
CHUNK = 2**30
PRODUCTS, ATTENTION, ATTENTION_BACKWARD, MEMORY = 750e12, 350e12, 330e12, 2.8e12
"""FLOP/s of a layer's products and of FlashAttention 4 as measured on an H100, and bytes/s of its memory."""
NVLINK, NODE_CARDS = 0.7 * 450e9, 8 * 0.75 * 50e9
GAPS, IMBALANCE = 1.1, 1.05


class Model(NamedTuple):
    """Published shapes."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    experts: int = 1
    chosen: int = 1

    @property
    def attention(self) -> int:
        return 128 * self.hidden * 2 * (self.heads + self.kv_heads)

    @property
    def layer(self) -> int:
        return self.attention + 3 * self.hidden * self.mlp * self.experts

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.head * (1 if self.tied else 2)


LLAMA_8B = Model(32, 4096, 14336, 32, 8, 128256)
QWEN_4B = Model(36, 2560, 9728, 32, 8, 151936, tied=True)
QWEN_14B = Model(40, 5120, 17408, 40, 8, 151936)
QWEN_30B = Model(48, 2048, 768, 32, 4, 151936, experts=128, chosen=8)
CASES = [
    pytest.param("Qwen3-4B", QWEN_4B, 4),
    pytest.param("Llama-3.1-8B", LLAMA_8B, 4, marks=pytest.mark.full),
    pytest.param("Qwen3-14B", QWEN_14B, 8, marks=pytest.mark.full),
    pytest.param("Qwen3-30B-A3B", QWEN_30B, 16, marks=pytest.mark.full),
]


def memory(model: Model, ranks: int) -> float:
    """Bytes of a rank."""
    states, inputs = 16 * model.parameters / ranks, 2 * BUDGET * model.hidden * model.layers
    at_head = 6 * model.head + 2.5 * CHUNK
    wide = model.chosen * (4 * model.mlp + (2 * model.hidden if model.experts > 1 else 0))
    computed = 2 * BUDGET * (wide + 8 * model.hidden + 3 * 128 * (model.heads + model.kv_heads))
    at_layer = 10 * model.layer + computed + (6 * model.head if model.tied else 0)
    return states + inputs + max(at_head, at_layer)


def micro_batch_seconds(model: Model, ranks: int) -> float:
    """Seconds of a micro-batch: forward, forward again, and backward, which is twice a forward pass."""
    active = model.attention + 3 * model.hidden * model.mlp * model.chosen
    products = 2 * BUDGET * (4 * model.layers * active + 3 * 0.5 * model.head) / PRODUCTS
    attention = 2 * BUDGET * ROW * 128 * model.heads * model.layers
    attending = 2 * attention / ATTENTION + 2.5 * attention / ATTENTION_BACKWARD
    compute = (products + attending + _elementwise(model) / MEMORY) * GAPS
    ring = 8 * model.parameters * (1 - 1 / ranks) / (NVLINK if ranks <= 8 else NODE_CARDS)
    return max(compute * IMBALANCE, ring)


def _elementwise(model: Model) -> float:
    """Bytes of everything else: norms, rotations, activations; of experts also the copies of their tokens."""
    passes = 12 if model.experts > 1 else 4  # compiled layers read and write a third of what they would as written
    width = 6 * model.hidden + 4 * 128 * (model.heads + model.kv_heads) + model.chosen * 4 * model.mlp
    routed = 6 * model.chosen * model.hidden if model.experts > 1 else 0
    return passes * 2 * BUDGET * model.layers * (width + routed) + 12 * 0.5 * BUDGET * model.vocabulary * 4


def planned(name: str, ranks: int, parent: Path) -> Trainer:
    settings: dict[str, Any] = {"gradient_checkpointing": True, "reshard_after_forward": True}
    return estimated(configured(ranks, ROW, **settings), model_folder(name, parent), profile("h100"))[0]


@pytest.mark.parametrize(("name", "model", "ranks"), CASES)
def test_bytes_and_seconds_of_a_rank_are_those_of_first_principles(
    name: str, model: Model, ranks: int, tmp_path: Path
) -> None:
    trainer = planned(name, ranks, tmp_path)
    seconds = trainer.seconds(profile("h100"), ranks, ranks * BUDGET / IMBALANCE, ROW, BUDGET)
    seconds -= trainer.step.optimizer_seconds
    expected, expected_seconds = memory(model, ranks), micro_batch_seconds(model, ranks) / IMBALANCE
    print(name, f"{sum(trainer.memory(ranks).values()) / 1e9:.1f} GB, by hand {expected / 1e9:.1f}")
    print(name, f"{seconds:.3f} s, by hand {expected_seconds:.3f}", trainer.step.peak, trainer.step.seconds)
    assert trainer.step.parameters == pytest.approx(model.parameters, rel=0.01)
    assert sum(trainer.memory(ranks).values()) == pytest.approx(expected, rel=0.10)
    assert seconds == pytest.approx(expected_seconds, rel=0.25)
