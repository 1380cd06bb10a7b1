"""The memory that a rank and an engine need on their GPUs, and a node in its host, by arithmetic on the shapes of the
model's weights.

The bytes of activations are those of a decoder layer's tensors in torch without compilation; they were checked against
training steps of seven models. Compiled layers keep less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from service.config import Config
from service.config.learn import TrainerConfig
from service.config.rollout import GeneratorConfig
from service.errors import UserError
from service.learn.compile import compiles_layers
from service.learn.model.hf_checkpoint import HEAD
from service.learn.model.hf_config import code_of_the_model, read_config
from service.learn.model.logprob import CHUNK_ENTRIES
from service.learn.model.policy_model import Checkpointing, stored_shapes, trained_shapes
from service.learn.model.router_replay import routing_of_model
from service.learn.settings import LearnSettings
from service.model_folder import EMBEDDING, experts_of
from service.plan.engine import ITEM_BYTES, kv_token_bytes


class Gpu(NamedTuple):
    """The values of a GPU's data sheet: dense bfloat16 FLOP/s, bytes/s and bytes of its memory."""

    flops: float
    bandwidth: float
    memory: float


GPUS = {
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "h20": Gpu(148e12, 4.0e12, 96e9),
    "a100": Gpu(312e12, 2.04e12, 80e9),
    "l40s": Gpu(362e12, 0.864e12, 48e9),
    "b200": Gpu(2250e12, 8.0e12, 180e9),
}
GPUS_OF_A_NODE = 8
MARGIN = 0.1
"""Fraction of a GPU's memory that must stay free, for CUDA contexts, collective buffers and fragmentation."""
ENGINE_BYTES = 3e9
"""Bytes that an engine needs on each GPU for CUDA graphs and buffers."""
PROCESS_BYTES = 5e9
"""Bytes of host memory that a rank or an engine takes for libraries and buffers, assumed."""
COMPILED = 0.63
"""Bytes that a compiled layer keeps for its backward pass, over those of the same layer without compilation."""


class FitSettings(NamedTuple):
    """The settings that determine how much memory a trainer rank and an engine need on their GPUs."""

    learn: LearnSettings
    generator: GeneratorConfig
    shares_gpus: bool
    """Whether each rank shares its GPU with an engine (`weights.transport: ipc`)."""
    buffer_bytes: int
    """`buffer.max_bytes`."""

    @classmethod
    def of(cls, config: Config) -> FitSettings:
        """Take from a run's configuration the settings that determine the memory."""
        shares_gpus = config.weights.transport == "ipc"
        return cls(LearnSettings.of(config), config.generator, shares_gpus, config.buffer.max_bytes)

    @property
    def gpus(self) -> int:
        """Number of GPUs that the configuration takes."""
        engines = 0 if self.shares_gpus else self.generator.max_engines
        return self.learn.trainer.ranks + engines * self.generator.engine_gpus


class Size(NamedTuple):
    """The size of a model."""

    parameters: int
    trained: int
    """All parameters, or those of the adapter."""
    active: float
    """Parameters that a token is multiplied with."""
    embedding: int
    """Parameters of the embedding, and of the output head if the two are not tied."""
    head: int
    layers: int
    hidden: int
    kept: float
    """Bytes of bfloat16 that a layer keeps for each token, without checkpointing."""
    peak: float
    """Bytes for each token in the layer whose backward pass runs."""
    query_width: int
    """Query heads times their dimension."""
    routed: int
    """Bytes of the recorded experts of one token."""

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint: each trained weight with its two moments, in float32."""
        return 12 * self.trained

    @classmethod
    def of(cls, folder: Path, learn: LearnSettings, record_experts: bool = False) -> Size:
        """Read the size from the config.json of a folder."""
        model, lora = read_config(folder), learn.model.lora
        with code_of_the_model(folder):
            count = {name: prod(shape) for name, shape in stored_shapes(model).items()}
            adapter = {} if lora is None else trained_shapes(model, lora)
        head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        query, hidden = model.num_attention_heads * head_dim, model.hidden_size
        attention = query + 2 * model.num_key_value_heads * head_dim
        experts, topk = experts_of(model), getattr(model, "num_experts_per_tok", 0) or 0
        mlp = getattr(model, "intermediate_size", 0)
        if experts:
            mlp = topk * getattr(model, "moe_intermediate_size", mlp)
            mlp += getattr(model, "shared_expert_intermediate_size", 0) or 0
        routed = sum(size for name, size in count.items() if ".experts." in name)
        embedding = sum(count.get(name, 0) for name in (EMBEDDING, HEAD))
        unused = routed * (1 - topk / experts) if experts else 0.0
        looked_up = count[EMBEDDING] if HEAD in count else 0
        parameters = sum(count.values())
        return cls(
            parameters=parameters,
            trained=parameters if lora is None else sum(map(prod, adapter.values())),
            active=parameters - unused - looked_up,
            embedding=embedding,
            head=model.vocab_size * hidden,
            layers=model.num_hidden_layers,
            hidden=hidden,
            kept=16.0 * hidden + 8 * mlp + 7.5 * attention + 6 * topk * hidden,
            peak=26.0 * hidden + 10 * mlp + 8 * attention + 8 * topk * hidden,
            query_width=query,
            routed=routing_of_model(model, record_experts).token_bytes,
        )


def rank_bytes(size: Size, learn: LearnSettings, level: Checkpointing, ranks: int) -> dict[str, float]:
    """Peak bytes on the GPU of one of `ranks` ranks, by part, in a step whose micro-batches are full."""
    trainer, width = learn.trainer, ITEM_BYTES[learn.model.dtype]
    is_sharded = ranks > 1 or trainer.sharded
    shards = shards_of(trainer, ranks)
    master = 4 if is_sharded or width > 2 else 4 + width  # bfloat16 and float32 weights if unsharded
    weights = (master * size.trained + width * (size.parameters - size.trained)) / shards
    states = {"weights": weights, "gradients": 4 * size.trained / shards, "optimizer": 8 * size.trained / shards}
    if trainer.cpu_offload:
        states = {} if is_sharded else {"weights": width * size.parameters}
    layer = (size.parameters - size.embedding) / size.layers
    gathered = width * (size.embedding + 3 * layer) if is_sharded else 0.0
    gathered += width * size.parameters if is_sharded and not level.regather else 0.0
    tokens = max(trainer.max_tokens_per_micro_batch, learn.longest_row // trainer.sequence_parallel)
    compiled = compiles_layers(trainer, None, getattr(torch, learn.model.dtype))
    kept = size.kept * (COMPILED if compiled else 1.0)
    stored = level.layers * 2 * size.hidden + (size.layers - level.layers) * kept
    logits = 10.0 * min(CHUNK_ENTRIES["cuda"], tokens * size.head / size.hidden)
    logits += 0.0 if learn.model.lora is not None else 4 * size.head
    in_layer = size.peak * tokens * width / 2
    activations = stored * tokens * width / 2 + (in_layer if in_layer > logits else 0.0)
    logits = logits if logits >= in_layer else 0.0
    # the recorded experts of all micro-batches are on the GPU at once
    trajectories = trainer.mini_batch_size * learn.algorithm.n_samples_per_prompt
    experts = size.routed * max(tokens, trajectories * learn.longest_row / ranks)
    return {**states, "gathered": gathered, "activations": activations, "logits": logits, "experts": experts}


def shards_of(trainer: TrainerConfig, ranks: int) -> int:
    """Number of ranks among which each copy of the weights is divided."""
    return min(ranks, GPUS_OF_A_NODE) if trainer.shard_within == "node" else ranks


def host_bytes(size: Size, settings: FitSettings) -> dict[str, float]:
    """Bytes of memory that a full node with rank 0 and the driver needs, by use."""
    trainer, weights = settings.learn.trainer, size.trained * ITEM_BYTES[settings.learn.model.dtype]
    here = size.trained * min(1.0, GPUS_OF_A_NODE / shards_of(trainer, trainer.ranks))  # parameters of the node's ranks
    return {
        "processes": PROCESS_BYTES * min(GPUS_OF_A_NODE, settings.gpus),
        "two versions of the weights": 0.0 if settings.shares_gpus else 2 * weights,
        "copies for a checkpoint": 12 * here if trainer.checkpoint_every else 0.0,
        "offloaded states": 16 * here if trainer.cpu_offload else 0.0,
        "final weights": weights,
        "buffer": settings.buffer_bytes,
    }


class Fit(NamedTuple):
    """Memory of a rank's GPU and of an engine's GPU in bytes; with `weights.transport: ipc` both are one GPU."""

    size: Size
    rank: Mapping[str, float]
    """Bytes of a rank by part; the part `engine` is for an engine on the same GPU, with its copy of the weights."""
    checkpointing: Checkpointing
    """As set, or for `auto` the lightest level that fits."""
    gpu_bytes: float
    engine_bytes: float
    """Bytes of weights and buffers of an engine on each of its GPUs."""
    kv_bytes: float
    """Bytes of an engine's KV cache on each of its GPUs."""
    kv_token_bytes: int
    longest: int
    """Length of the longest request, in tokens."""
    host: Mapping[str, float]
    """Bytes of a node's host by part."""

    @property
    def rank_bytes(self) -> float:
        """Bytes that the GPU of a rank needs."""
        return sum(self.rank.values())

    @property
    def room(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.gpu_bytes * (1 - MARGIN)

    def problem(self) -> str | None:
        """A text that says why the configuration does not fit, with possible remedies; None if it fits."""
        room, parts = f"of its {_gb(self.gpu_bytes)} GB {_gb(self.room)} can be used", in_parts(self.rank)
        if self.rank_bytes > self.room:
            return (
                f"trainer.ranks: the GPU of a rank needs {_gb(self.rank_bytes)} GB, {room}: {parts}; use more "
                "ranks, trainer.cpu_offload=true or trainer.gradient_checkpointing=auto, or lower "
                "trainer.max_tokens_per_micro_batch (for longer rows raise trainer.sequence_parallel)"
            )
        longest = self.longest * self.kv_token_bytes
        if self.engine_bytes + longest > self.room:
            return (
                f"generator.tensor_parallel_size: a GPU of an engine needs {_gb(self.engine_bytes)} GB and the KV "
                f"cache of {self.longest} tokens, {room}; use more GPUs an engine"
            )
        if self.kv_bytes < longest:
            return (
                f"generator.gpu_memory_utilization: {_gb(max(0.0, self.kv_bytes))} GB are left for an engine's KV "
                f"cache, less than a request of {self.longest} tokens takes; raise it, or generator.kv_cache_bytes"
            )
        return None

    def lines(self) -> Iterator[str]:
        """The memory as lines of text."""
        needed, room = _gb(self.rank_bytes), _gb(self.room)
        yield f"the GPU of a rank needs {needed} GB of {room} that can be used ({in_parts(self.rank)})"
        yield f"{self.checkpointing.layers} of {self.size.layers} layers keep their input only"
        tokens = int(self.kv_bytes / self.kv_token_bytes)
        yield (
            f"a GPU of an engine holds {_gb(self.engine_bytes)} GB and a KV cache of {_gb(self.kv_bytes)} GB "
            f"({tokens} tokens, {tokens // self.longest} of the longest requests)"
        )
        yield f"the host of a node needs about {_gb(sum(self.host.values()))} GB ({in_parts(self.host)})"

    def host_note(self) -> str | None:
        """A note that this host has less memory than a node needs; None if it has enough."""
        needed, total = sum(self.host.values()), psutil.virtual_memory().total
        if needed <= total:
            return None
        return (
            f"this host has {_gb(total)} GB of memory, and a full node needs about {_gb(needed)} GB, first for "
            f"{in_parts(self.host)}; take more memory or nodes, or set trainer.checkpoint_every=0"
        )


def in_parts(parts: Mapping[str, float]) -> str:
    """Parts of memory in GB, the largest first."""
    return ", ".join(f"{part} {_gb(held)}" for part, held in sorted(parts.items(), key=lambda p: -p[1]) if held)


def _gb(held: float) -> str:
    return f"{held / 1e9:.1f}"


def fit(settings: FitSettings, folder: Path, gpu_bytes: float) -> Fit:
    """The memory that a configuration needs on GPUs of `gpu_bytes`; `folder` needs only a `config.json`."""
    learn, generator = settings.learn, settings.generator
    size = Size.of(folder, learn, generator.record_experts)
    width = ITEM_BYTES[learn.model.dtype]
    engine = size.parameters * width / generator.engine_gpus + ENGINE_BYTES
    kv = generator.kv_cache_bytes or gpu_bytes * generator.gpu_memory_utilization - engine
    # an engine on the rank's GPU loads from a whole copy of the trained weights
    shared = engine + kv + size.trained * width if settings.shares_gpus else 0.0
    level: Checkpointing | None = Checkpointing.of(learn.trainer, size.layers)
    while level is not None:
        chosen, held = level, {**rank_bytes(size, learn, level, learn.trainer.ranks), "engine": shared}
        fits = sum(held.values()) <= gpu_bytes * (1 - MARGIN) or learn.trainer.gradient_checkpointing != "auto"
        level = None if fits else level.lighter(size.layers, compiled=False)
    token_bytes = kv_token_bytes(read_config(folder), generator, learn.model.dtype)
    host = host_bytes(size, settings)
    return Fit(size, held, chosen, gpu_bytes, engine, kv, token_bytes, learn.longest_row, host)


def known_gpu(trainer: TrainerConfig) -> tuple[str, float] | None:
    """Name and memory in bytes of the GPU in the trainer's settings, or else of this machine's GPU; None if neither is
    known."""
    name: Any = trainer.accelerator
    if name is not None and (sheet := GPUS.get(name.lower())) is not None:
        return f"{name}, as trainer.accelerator says", sheet.memory
    if not torch.cuda.is_available():
        return None
    here = torch.cuda.get_device_properties(0)
    return f"{here.name}, the GPU of this machine", float(here.total_memory)


def refuse_too_large(settings: FitSettings, folder: Path) -> Fit | None:
    """The memory that a configuration needs on its GPUs; None if these are not known.

    Raises:
        UserError: the configuration does not fit its GPUs; the message names a remedy.
    """
    if (gpu := known_gpu(settings.learn.trainer)) is None:
        return None
    found = fit(settings, folder, gpu[1])
    if problem := found.problem():
        raise UserError(problem)
    return found
