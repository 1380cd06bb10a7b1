"""Checks whether a trainer rank and an engine fit into the memory of their GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from service.config.learn import TrainerConfig
from service.errors import UserError
from service.learn.estimate.gpus import DATA_SHEETS
from service.learn.estimate.kv_cache import kv_token_bytes
from service.learn.estimate.step import StepEstimate, estimate_step
from service.learn.model.hf_config import read_config
from service.learn.model.policy_model import Checkpointing
from service.learn.settings import FitSettings
from service.model_folder import experts_of

NO_GPU = "H100"
"""The GPU that is assumed if neither the configuration nor the machine tells which GPU is used."""

GPU_BYTES = {name.upper(): sheet.memory for name, sheet in DATA_SHEETS.items()}
"""Nominal memory of each GPU in bytes, by the name of its accelerator type in Ray."""

MARGIN = 0.1
"""Fraction of a GPU's memory that an estimate leaves free for CUDA contexts, collective buffers and fragmentation."""

AMPLE_MARGIN = 0.15
"""Fraction of a GPU's memory that is left free if this costs little time, because estimates are not exact."""

ENGINE_BYTES = 3e9
"""Bytes that an engine needs for CUDA graphs and buffers."""


@dataclass(frozen=True)
class Fit:
    """Estimated memory of a rank's GPU and of an engine's GPU; with `weights.transport: ipc` both are one GPU."""

    step: StepEstimate
    """The estimate of a training step, which includes its memory."""
    checkpointing: Checkpointing
    """The gradient checkpointing: as set, or as chosen for `auto`."""
    n_layers: int
    gpu_bytes: float
    shared_bytes: float
    """Bytes of the engine on the rank's GPU, including the gathered weights that the engine loads; 0 if the engine has
    its own GPUs."""
    engine_bytes: float
    """Bytes of weights and buffers of an engine on each of its GPUs."""
    kv_bytes: float
    """Bytes of an engine's KV cache on each of its GPUs."""
    kv_token_bytes: int
    longest: int
    """Length of the longest request, in tokens."""

    @property
    def rank_bytes(self) -> float:
        """Bytes that the GPU of a rank needs."""
        return self.step.peak_bytes + self.shared_bytes

    def problem(self) -> str | None:
        """A text that says why the configuration does not fit, with possible remedies; None if it fits."""
        room = self.gpu_bytes * (1 - MARGIN)
        if self.rank_bytes > room:
            states = sum(self.step.peak.get(part, 0) for part in ("weights", "gradients", "optimizer"))
            helps = (
                "use more trainer.ranks, or trainer.cpu_offload=true"
                if 2 * states > self.step.peak_bytes
                else "lower trainer.max_tokens_per_micro_batch (for longer rows raise trainer.sequence_parallel)"
                if self.checkpointing.layers == self.n_layers
                else "set trainer.gradient_checkpointing=auto, or lower trainer.max_tokens_per_micro_batch"
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
        """The estimate as lines of text."""
        yield f"estimate: the GPU of a rank needs {_gb(self.rank_bytes)} GB ({self._parts()})"
        yield (
            f"estimate: {self.checkpointing.layers} of {self.n_layers} layers keep their input only"
            + (", the others no results of elementwise operations" if self.checkpointing.elementwise else "")
            + ("" if self.checkpointing.regather else "; gathered weights are kept for the backward pass")
        )
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


def known_gpu(trainer: TrainerConfig) -> tuple[str, float] | None:
    """Name and memory in bytes of the GPU in the trainer's settings, or else of this machine's GPU; None if neither is
    known."""
    if trainer.accelerator in GPU_BYTES:
        return f"{trainer.accelerator}, as trainer.accelerator says", GPU_BYTES[trainer.accelerator]
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    return f"{here.name}, the GPU of this machine", float(here.total_memory)


def is_estimable(settings: FitSettings, folder: Path) -> bool:
    """True if a training step of this configuration can be estimated. It cannot for a model with experts whose data
    type is not bfloat16, because fake tensors support the experts' matrix products only in bfloat16."""
    return settings.learn.model.dtype == "bfloat16" or not experts_of(read_config(folder))


def fit(settings: FitSettings, folder: Path, gpu_bytes: float) -> Fit:
    """Estimate the memory that a configuration needs on GPUs of `gpu_bytes`; `folder` needs only a `config.json`."""
    learn, generator, hf_config = settings.learn, settings.generator, read_config(folder)
    dtype = getattr(torch, learn.model.dtype)
    width, n_layers = torch.finfo(dtype).bits / 8, hf_config.num_hidden_layers

    def engine_and_kv(step: StepEstimate) -> tuple[float, float]:
        engine = step.parameters * width / generator.engine_gpus + ENGINE_BYTES
        return engine, generator.kv_cache_bytes or gpu_bytes * generator.gpu_memory_utilization - engine

    def shared(step: StepEstimate) -> float:
        # the engine loads from a whole copy of the trained weights, in addition to the rank's memory
        return sum(engine_and_kv(step)) + step.trained * width if settings.shares_gpus else 0.0

    def room(step: StepEstimate) -> tuple[float, float]:
        return gpu_bytes * (1 - MARGIN) - shared(step), gpu_bytes * (1 - AMPLE_MARGIN) - shared(step)

    checkpointing, step = Checkpointing.of(learn.trainer, n_layers), estimate_step(learn, folder)
    if learn.trainer.gradient_checkpointing == "auto":
        while step.peak_bytes > room(step)[0] and (lighter := checkpointing.lighter(n_layers, compiled=False)):
            checkpointing, step = lighter, estimate_step(learn, folder, checkpointing=lighter)
    weights = round(step.parameters * width)
    if learn.trainer.keeps_gathered and dtype == torch.bfloat16 and step.peak_bytes + weights <= room(step)[1]:
        checkpointing = checkpointing._replace(regather=False)
        step = replace(step, peak={**step.peak, "gathered": step.peak.get("gathered", 0) + weights})
    engine, kv = engine_and_kv(step)
    return Fit(
        step=step,
        checkpointing=checkpointing,
        n_layers=n_layers,
        gpu_bytes=gpu_bytes,
        shared_bytes=shared(step),
        engine_bytes=engine,
        kv_bytes=kv,
        kv_token_bytes=kv_token_bytes(hf_config, generator, learn.model.dtype),
        longest=learn.longest_row,
    )


def refuse_too_large(settings: FitSettings, folder: Path) -> Fit | None:
    """Check that a configuration fits its GPUs, and return the memory that it needs; None if the GPU is unknown or no
    estimate is possible.

    Raises:
        UserError: the configuration does not fit; the message names a remedy.
    """
    gpu = known_gpu(settings.learn.trainer)
    if gpu is None or not is_estimable(settings, folder):
        return None
    found = fit(settings, folder, gpu[1])
    if problem := found.problem():
        raise UserError(problem)
    return found
