"""Implements the rollout's `Engine` protocol with vLLM: token ids go in; token ids, log-probabilities and policy
versions come out.

A process has one `AsyncLLM`. Weights change while requests run:

    check the memory of the weights -> pause (requests stay) -> pull, check, label with the version -> resume

With `model.lora` only the adapter is updated in this way, and each request names the adapter; see
`actors.weights.policy_tensors`.

vLLM is imported inside functions, because `engine_env` must be set before its first import. The driver and the tests
import this module without vLLM.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import pydantic
from pydantic_core import ErrorDetails

from actors.engine.engine_load import EngineLoad, EngineTimes
from actors.engine.expected_warnings import ANSWERS, ENDED, drop
from actors.engine.vllm_arguments import OWNER_PID, TIES, EngineSettings, can_overflow, engine_arguments, on_gpu
from actors.engine.vllm_arguments import engine_env as engine_env
from actors.heap import freeze_heap
from actors.watchdog import MARK
from actors.weights.part import Source
from actors.weights.policy_tensors import ADAPTER, ADAPTER_ID, PolicySize, WeightBytes, decode_announcement
from actors.weights.pulled import WeightFile
from service.config import Config, LoraConfig
from service.environment_variables import SAFE_PATH
from service.errors import RunFailed, Starved, UserError
from service.model_folder import head_rows
from service.observe.metrics import Metrics
from service.rollout.engine import Generation, Sampling
from service.types import MAX_SUPPORT, NO_VERSION, Float32s, Ids, Int32s, Int64s, PolicyVersion, Uint16s, max_support

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from actors.engine.stats import LoadRecorder

Answer = TypeVar("Answer")

CHECK_SECONDS = 1.0
"""While a call waits for the engine core's answer: seconds between two checks whether the core is alive."""
WARM_UP = np.ones(8, np.int32)
"""Token ids of the warm-up prompt."""
UPDATE_TRIES = 2
"""Maximum tries of one update. Between two tries the engine stays paused, because it may hold weights of two
versions."""


class WeightUpdate(NamedTuple):
    """The size of one weight update, and the time for which it paused the engine's requests."""

    bytes: int
    pause_seconds: float


class VllmEngine:
    """One vLLM engine in this process; implements `service.rollout.engine.Engine`."""

    def __init__(self, config: Config, model_folder: Path, number: int = 0) -> None:
        self.serving = PolicyVersion(0, 0)
        self.times = EngineTimes()
        self.cached_tokens = 0
        """Number of prompt tokens that were found in the KV cache."""
        self._config, self._number = config, number
        self._model_folder = Path(model_folder)
        self._llm: AsyncLLM | None = None
        self._stopped = False
        self._update_lock = asyncio.Lock()
        self._size = PolicySize(0, tied=False)
        """The number of elements that an update must have."""
        self._salt: str | None = None
        """vLLM's cache salt of new requests; None: new requests may use any cached prefix."""
        self._vocab_size = 0
        self._expert_type = np.dtype(np.int16)
        """The dtype in which routed experts are recorded."""
        self._adapter: LoRARequest | None = None
        """The reference to the policy's adapter in each request; None: the policy has no adapter."""
        self._recorder: LoadRecorder | None = None
        """Records the engine's load. None if the KV cache cannot overflow: recording takes a quarter of the time of a
        short turn."""

    async def start(self, version: PolicyVersion) -> None:
        """Load the model and generate once, so that the first real request finds a warm engine.

        Raises:
            UserError: model and KV cache do not fit into the free memory, or vLLM refuses the settings.
            RunFailed: vLLM did not start.
            Starved: vLLM did not start within `run.start_deadline`.
        """
        deadline = self._config.run.start_deadline
        try:
            async with asyncio.timeout(deadline):
                await self._unless_dead(self._start(version))
        except TimeoutError as error:
            raise Starved(f"the engine did not start within {deadline:.0f} s") from error

    async def _start(self, version: PolicyVersion) -> None:
        self._size = PolicySize.of_folder(self._model_folder, self._config.model.lora)
        self._vocab_size = head_rows(self._model_folder)
        settings = EngineSettings.of(self._config, self._number)
        arguments = engine_arguments(settings, self._model_folder)
        with_load = can_overflow(settings, self._model_folder)
        try:
            llm, self._recorder = await asyncio.to_thread(build, arguments, with_load)
        except pydantic.ValidationError as error:  # the error itself cannot be sent to the driver
            why = "; ".join(_told(problem) for problem in error.errors())
            raise UserError(f"generator: vLLM refuses the settings for {self._model_folder}: {why}") from error
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:  # refused values
            if not self._config.generator.engine_options:
                raise
            raise UserError(f"generator.engine_options: vLLM does not start with them: {error!r}") from error
        except RuntimeError as error:
            raise RunFailed(f"vLLM did not start on {self._model_folder}; its log says why: {error}") from error
        self._llm = llm
        if self._config.model.lora is not None:
            self._adapter = await _start_adapter(llm, self._config.model.lora, self._size)
        await llm.update_weight_version(str(version.pack()))
        self._serve(version)
        warm_up = await self.generate(WARM_UP, Sampling(max_tokens=2), "warm-up")
        await llm.collective_rpc("unlink_shared_memory")
        if arguments.get("enable_return_routed_experts"):
            self._expert_type = _checked_experts(self._model_folder, warm_up)
        freeze_heap()
        # The engine's processes run now. Programs that environments start later may need modules of their own folder.
        os.environ.pop(SAFE_PATH, None)

    @property
    def running(self) -> int:
        """Return the number of requests in the engine, including waiting ones."""
        return self.times.running

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sample the response to a prompt: one turn of a conversation.

        Raises:
            RunFailed: the engine is dead.
        """
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": prompt_ids.tolist()}
        if self._salt is not None:
            prompt["cache_salt"] = self._salt
        parameters = _sampling_params(sampling, self._vocab_size)
        with self.times.request() as seconds_of:
            try:
                llm = self._running()
                outputs = llm.generate(prompt, parameters, request_id, lora_request=self._adapter)
                output = [output async for output in outputs][-1]
            except Exception as error:  # noqa: BLE001 - raised, as it is or as the core's death
                raise self._death() or error from error.__cause__
            seconds = seconds_of(output.metrics)
        completion = output.outputs[0]
        token_ids, experts = np.asarray(completion.token_ids, np.int32), completion.routed_experts
        self.cached_tokens += output.num_cached_tokens or 0
        asked = parameters.logprobs or 0
        # the token itself, then the most probable ones
        logprobs = np.asarray(() if completion.logprobs is None else completion.logprobs.logprobs, np.float32)
        logprobs = logprobs.reshape(-1, 1 + asked)
        support: tuple[Uint16s | None, Ids | None] = None, None
        if asked and completion.logprobs is not None:
            ids = np.asarray(completion.logprobs.token_ids, np.int32).reshape(logprobs.shape)
            support = supports(ids, logprobs, self._vocab_size)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs[:, 0],
            versions=_versions(completion.weight_versions, len(token_ids)),
            stop_reason=completion.finish_reason,
            sampled_end=completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str),
            routed_experts=None if experts is None else np.asarray(experts).astype(self._expert_type),
            support_size=support[0],
            support=support[1],
            seconds=seconds,
        )

    async def update_weights(
        self, version: PolicyVersion, data: WeightBytes | Sequence[Source], checksum: int
    ) -> WeightUpdate:
        """Load new weights while requests run.

        `data`: the sources from which to pull the weights; or a rank's announcement of the tensors that it shares.
        `checksum`: the announcement's checksum.

        Raises:
            ValueError: the weights do not fit the policy, or are older than the served weights, which stay.
            WeightsGone: the holder of the weights has ended or has newer weights. The engine keeps the old weights; if
            the engine had begun to load, it stays paused until the next update.
            RunFailed: the engine could not load the weights; the engine stays paused and must be ended.
        """
        async with self._update_lock:
            if version < self.serving:
                raise ValueError(f"weights of version {version} are older than {self.serving}, which the engine serves")
            if self._config.weights.transport == "memory":
                return await self._unless_dead(self._pull(version, cast(Sequence[Source], data)))
            info, n_bytes = decode_announcement(cast(WeightBytes, data), checksum, self._size)
            return WeightUpdate(n_bytes, await self._unless_dead(self._swap(version, info, tries=1)))

    async def _pull(self, version: PolicyVersion, sources: Sequence[Source]) -> WeightUpdate:
        with closing(WeightFile(version.pack(), sources)) as file:
            self._size.check((name, stored.shape) for name, stored in file.stored().items())
            try:
                return WeightUpdate(file.n_bytes, await self._swap(version, file.info(), UPDATE_TRIES))
            except RunFailed:
                file.check()  # raises `WeightsGone` if the weights were replaced
                raise

    async def _swap(self, version: PolicyVersion, info: dict[str, Any], tries: int) -> float:
        llm = self._running()
        # `pause_generation` would also sleep 20 ms, only to order the outputs.
        clear_cache = self._config.weights.kv_cache == "recompute"
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
        self.times.pause()
        for _ in range(tries):
            answers = await llm.collective_rpc("load_update", kwargs={"update_info": info})
            if (why := next((why for why, _ in answers if why), None)) is None:
                break
        else:  # the engine has parts of two versions and must not resume
            raise RunFailed(f"the weights of version {version} were not loaded in {tries} tries: {why}")
        if unread := set[str].intersection(*(set(unread) for _, unread in answers)):
            raise RunFailed(f"weights {version}: the engine read nothing of {len(unread)} tensors, as {min(unread)}")
        if clear_cache and self._recorder is not None:
            self._recorder.preempted_by_update()  # every step before the pause was recorded
        await llm.update_weight_version(str(version.pack()))
        self._serve(version)
        await llm.resume_generation()
        return self.times.resume()

    def _serve(self, version: PolicyVersion) -> None:
        self.serving = version
        if self._config.weights.kv_cache == "keep":
            self._salt = str(version.pack())  # a new prompt must not reuse a prefix that another version cached

    async def check(self, deadline: float) -> None:
        """Check that the engine is alive.

        Raises:
            RunFailed: the engine is dead, or did not answer within `deadline` seconds.
        """
        try:
            async with asyncio.timeout(deadline):
                await self._unless_dead(self._running().get_weight_version())
        except TimeoutError:
            raise RunFailed(f"the engine core did not answer within {deadline:.0f} s") from None

    @property
    def load(self) -> EngineLoad | None:
        """Return the engine's load; None if its KV cache has room for all requests at their maximum length."""
        return self._recorder.load if self._recorder is not None else None

    def measure(self, metrics: Metrics) -> None:
        """Record the engine's current state and its counts since the start as metrics."""
        metrics.set("baton_generator_running_requests", self.running)
        metrics.set("baton_generator_policy_version", self.serving.step)
        metrics.count_to("baton_prefix_cached_tokens_total", self.cached_tokens)
        if (load := self.load) is not None:
            metrics.set("baton_generator_waiting_requests", load.waiting)
            metrics.set("baton_generator_kv_cache_ratio", load.kv_cache_ratio)
            metrics.count_to("baton_generator_preemptions_total", load.preemptions)

    def check_alive(self) -> None:
        """Raise `RunFailed` if the engine is dead or stopped."""
        if (death := self._death()) is not None:
            raise death

    async def _unless_dead(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        """Wait for the engine core's answer. Raises `RunFailed` if the core dies or the call fails in the core. (If the
        core dies, vLLM would wait for ever, or raise its own error.)"""
        waiting = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([waiting], timeout=CHECK_SECONDS))[0]:
                if (death := self._death()) is not None:
                    raise death
            return waiting.result()
        except Exception as error:  # noqa: BLE001 - raised, as it is or as the core's death
            if type(error) is Exception:  # the core's error: it may notice a worker's death late
                error = RunFailed(f"the engine core failed: {error}")
            raise self._death() or error from error.__cause__
        finally:
            waiting.cancel()

    def _death(self) -> RunFailed | None:
        if self._stopped:
            return RunFailed("the engine is stopped")
        dead = self._llm is not None and self._llm.errored
        return RunFailed("the engine core died; its log says why") if dead else None

    def stop(self) -> None:
        """End the engine's processes; calls that wait for an answer of the engine core get an error."""
        self._stopped = True
        llm, self._llm = self._llm, None
        if llm is not None:
            drop(ANSWERS, ENDED)
            llm.shutdown(timeout=5)
            llm.shutdown = lambda timeout=None: None  # else vLLM repeats its shutdown while Python ends, and fails

    def _running(self) -> AsyncLLM:
        if self._stopped:
            raise RunFailed("the engine is stopped")
        if self._llm is None:
            raise RuntimeError("the engine is not started")
        return self._llm


def _checked_experts(model_folder: Path, generation: Generation) -> np.dtype[Any]:
    """Return the dtype of recorded routed experts, after a check that they were recorded. (Only vLLM's Model Runner V2
    records them, and some settings switch it off without a message.)"""
    from service.learn.model.hf_config import read_config
    from service.learn.model.router_replay import routing_of_model

    routing = routing_of_model(read_config(model_folder))
    tokens = len(WARM_UP) + len(generation.token_ids) - 1
    experts = generation.routed_experts
    found = () if experts is None else experts.shape
    if found not in [(tokens, layers, routing.topk) for layers in routing.layers]:
        raise RunFailed(
            f"the engine recorded routed experts of the shape {found} for {tokens} tokens of {model_folder}; the "
            f"trainer replays {routing.topk} experts in {' or '.join(map(str, routing.layers))} layers (vLLM records "
            "them in its Model Runner V2: is VLLM_USE_V2_MODEL_RUNNER=0 set?)"
        )
    return routing.dtype


def build(arguments: dict[str, Any], with_load: bool = False) -> tuple[AsyncLLM, LoadRecorder | None]:
    """Start an engine. Returns the engine, and the recorder of its load (None unless `with_load`)."""
    from transformers import PreTrainedTokenizerFast
    from vllm import AsyncEngineArgs
    from vllm.v1.engine import logprobs
    from vllm.v1.engine.async_llm import AsyncLLM

    from actors.engine.stats import LoadRecorder
    from actors.engine.text_models import register

    # With stop strings, vLLM would decode each likely token, and fail at ids without a text. No code needs the texts.
    logprobs.convert_ids_list_to_tokens = lambda tokenizer, token_ids: [""] * len(token_ids)
    os.environ[OWNER_PID] = str(os.getpid())
    _start_tracker()
    if not on_gpu():
        register()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[LoadRecorder] if with_load else None)
    if llm.output_processor.tokenizer is not None:  # for stop texts; vLLM's own may decode otherwise
        llm.output_processor.tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments["model"])
    loggers = llm.logger_manager.stat_loggers if llm.logger_manager is not None else []
    return llm, next((logger for logger in loggers if isinstance(logger, LoadRecorder)), None)


@lru_cache
def _start_tracker() -> None:
    """Start, once in this process, multiprocessing's process that removes the engine's names in /dev/shm after the last
    of its processes has ended. Ray and the watchdog kill all processes of this one's group, and all with the run's
    mark, at once; so it has a group of its own, and an empty mark."""
    read, write = os.pipe()
    track = f"import os, multiprocessing.resource_tracker as it; os.fork() or it.main({read})"
    command = [sys.executable, "-I", "-S", "-Wignore", "-c", track]
    environment = os.environ | {MARK: ""}
    subprocess.run(command, check=True, pass_fds=[read], start_new_session=True, env=environment, timeout=60)
    os.close(read)
    resource_tracker._resource_tracker._fd = write  # type: ignore[attr-defined]


def _told(problem: ErrorDetails) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    return (f"{name}: " if name else "") + problem["msg"].removeprefix("Value error, ")


async def _start_adapter(llm: AsyncLLM, lora: LoraConfig, size: PolicySize) -> LoRARequest:
    """Load an adapter that changes nothing. Returns the reference with which requests select this and later
    adapters."""
    from vllm.lora.request import LoRARequest

    arguments = {"shapes": size.adapter, "rank": lora.rank, "alpha": lora.alpha}
    if any(reasons := await llm.collective_rpc("start_adapter", kwargs=arguments)):
        raise RunFailed(f"the engine cannot take an adapter as in model.lora: {max(reasons)}")
    return LoRARequest(ADAPTER, ADAPTER_ID, "never read, because the adapter is loaded")


@lru_cache(maxsize=1024)
def _sampling_params(sampling: Sampling, vocab_size: int) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fields = asdict(sampling) | {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
    asked = 0
    if fields.pop("with_supports") and sampling.temperature and (most := max_support(sampling)):
        asked = min(most + 1 + TIES, vocab_size)  # one more than the maximum, to see if a support is larger
    return SamplingParams(
        **fields,
        logprobs=asked,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # requests with the same sampling share this object unchanged
    )


def supports(ids_TX: Int32s, logprobs_TX: Float32s, vocab_size: int) -> tuple[Uint16s, Ids]:
    """Return [T] the size of each token's support, and [U] the other tokens of the supports, as in a `Step`. Each row
    of the arguments has X columns: the drawn token, then the most probable tokens. A token that the sampler left out
    has log-probability minus infinity.

    If the columns are too few for a support, its size is too large for a step.
    """
    possible_TX = logprobs_TX > -np.inf
    others_TX = possible_TX & (ids_TX != ids_TX[:, :1])
    others_TX[:, 0] = False
    ids_TX = np.sort(np.where(others_TX, ids_TX, np.int32(vocab_size)), axis=1)
    size_T = 1 + others_TX.sum(1)
    if ids_TX.shape[1] <= vocab_size:
        size_T[possible_TX[:, 1:].all(1)] = MAX_SUPPORT + 1
    others_U = ids_TX[ids_TX < vocab_size]
    return size_T.astype(np.uint16), others_U.astype(np.uint16) if vocab_size <= 1 << 16 else others_U


def _versions(spans: list[Any] | None, length: int) -> Int64s:
    """Return [T] packed versions, from vLLM's spans of (version, start, end).

    [("7", 0, 3), ("8", 3, 5)] -> [7 7 7 8 8]
    """
    if spans is not None and len(spans) == 1:
        return np.full(length, int(spans[0].version), np.int64)
    versions = np.full(length, NO_VERSION, np.int64)
    for span in spans or ():
        versions[span.start : span.end] = int(span.version)
    return versions
