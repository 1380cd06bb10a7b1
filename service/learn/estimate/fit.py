"""Whether a rank and an engine fit into the memory of their GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from service.config.tree import Config
from service.errors import UserError
from service.learn.estimate.step import StepEstimate, estimate_step
from service.learn.model.hf_config import read_config

GPU_BYTES = {"H100": 80e9, "A100": 80e9, "H200": 141e9, "B200": 180e9}
"""Memory of GPUs by Ray's accelerator type, as sold."""

MARGIN = 0.1
"""Fraction of a GPU's memory that stays free, for CUDA contexts, collectives and fragments."""

ENGINE_BYTES = 3e9
"""CUDA graphs and buffers of an engine."""


@dataclass(frozen=True)
class Fit:
    """The memory of a rank's GPU and of an engine's, which are the same one with `weights.transport: ipc`."""

    step: StepEstimate
    gpu_bytes: float
    shared_bytes: float
    """The engine's part of the rank's GPU, with the weights that it loads from; 0 if it has GPUs of its own."""
    engine_bytes: float
    """Weights and buffers of an engine on each of its GPUs."""
    kv_bytes: float
    """KV cache of an engine on each of its GPUs."""
    kv_token_bytes: float
    longest: int
    """Tokens of the longest request."""

    @property
    def rank_bytes(self) -> float:
        """Bytes that are needed on the GPU of a rank."""
        return self.step.peak_bytes + self.shared_bytes

    def problem(self) -> str | None:
        """Why the configuration does not fit, with what helps; None if it fits."""
        room = self.gpu_bytes * (1 - MARGIN)
        if self.rank_bytes > room:
            states = sum(self.step.peak.get(part, 0) for part in ("weights", "gradients", "optimizer"))
            helps = (
                "use more trainer.ranks, or trainer.cpu_offload=true"
                if 2 * states > self.step.peak_bytes
                else "set trainer.gradient_checkpointing=true, or lower trainer.max_tokens_per_micro_batch"
            )
            return (
                f"trainer.ranks: the GPU of a rank needs {_gb(self.rank_bytes)} GB, of its {_gb(self.gpu_bytes)} GB "
                f"{_gb(room)} can be used: {self._parts()}; {helps}"
            )
        if self.engine_bytes + self.longest * self.kv_token_bytes > room:
            return (
                f"generator.tensor_parallel_size: a GPU of an engine needs {_gb(self.engine_bytes)} GB and the KV "
                f"cache of {self.longest} tokens, of its {_gb(self.gpu_bytes)} GB {_gb(room)} can be used; use more "
                "GPUs an engine"
            )
        if self.kv_bytes < self.longest * self.kv_token_bytes:
            return (
                f"generator.gpu_memory_utilization: {_gb(max(0.0, self.kv_bytes))} GB are left for an engine's KV "
                f"cache, less than a request of {self.longest} tokens takes; raise it, or generator.kv_cache_bytes"
            )
        return None

    def lines(self) -> Iterator[str]:
        """The estimate in words."""
        yield f"estimate: the GPU of a rank needs {_gb(self.rank_bytes)} GB ({self._parts()})"
        tokens = int(self.kv_bytes / self.kv_token_bytes)
        yield (
            f"estimate: a GPU of an engine holds {_gb(self.engine_bytes)} GB and a KV cache of {_gb(self.kv_bytes)} GB "
            f"({tokens} tokens, {tokens // self.longest} of the longest requests)"
        )

    def _parts(self) -> str:
        parts = {**self.step.peak, "engine": self.shared_bytes}
        return ", ".join(f"{part} {_gb(held)}" for part, held in sorted(parts.items(), key=lambda p: -p[1]) if held)


def _gb(held: float) -> str:
    return f"{held / 1e9:.1f}"


def known_gpu_bytes(config: Config) -> float | None:
    """Memory of the GPUs that the configuration names, else of this machine's; None where nothing says it."""
    if config.trainer.accelerator in GPU_BYTES:
        return GPU_BYTES[config.trainer.accelerator]
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def fit(config: Config, folder: Path, gpu_bytes: float) -> Fit:
    """How a configuration uses GPUs of this size; `folder` needs a `config.json` only."""
    step, hf_config, generator = estimate_step(config, folder), read_config(folder), config.generator
    width, shared = torch.finfo(getattr(torch, config.model.dtype)).bits / 8, config.weights.transport == "ipc"
    engine = step.parameters * width / generator.tensor_parallel_size + ENGINE_BYTES
    kv = generator.kv_cache_bytes or gpu_bytes * generator.gpu_memory_utilization - engine
    return Fit(
        step=step,
        gpu_bytes=gpu_bytes,
        # the engine loads from a whole copy of the weights beside the rank's
        shared_bytes=engine + kv + step.parameters * width if shared else 0.0,
        engine_bytes=engine,
        kv_bytes=kv,
        kv_token_bytes=_kv_token_bytes(hf_config, width) / generator.tensor_parallel_size,
        longest=generator.max_input_length + generator.max_generate_length,
    )


def _kv_token_bytes(config: PretrainedConfig, width: float) -> float:
    """Bytes of a token's keys and values in all layers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * width)


def refuse_too_large(config: Config, folder: Path) -> Fit | None:
    """Refuse a model that does not fit its GPUs; None where nothing says how large these are.

    Raises:
        UserError: with what helps.
    """
    # fake products of experts support bfloat16 only
    if config.model.dtype != "bfloat16" or (gpu_bytes := known_gpu_bytes(config)) is None:
        return None
    found = fit(config, folder, gpu_bytes)
    if problem := found.problem():
        raise UserError(problem)
    return found
