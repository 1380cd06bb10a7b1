"""An engine around a vLLM that is told what to answer: the order of an update, where a part of it fails, and turns."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pydantic
import pytest
import torch
import xxhash
from safetensors.torch import save

import actors.engine.vllm_arguments
import actors.engine.vllm_engine
from actors.engine.vllm_engine import WARM_UP, VllmEngine, supports
from actors.weights.memory import WeightMemory
from actors.weights.part import Source
from actors.weights.policy_tensors import ADAPTER_ID, PolicySize, encode_announcement
from actors.weights.pulled import file_of
from service.config import Config, RunConfig, WeightsConfig
from service.errors import RunFailed, UserError, WeightsGone
from service.rollout.engine import Generation, Sampling, validate_generation
from service.types import MAX_SUPPORT, NO_VERSION, PolicyVersion
from tests.pure.actors.fakes import at, image_of, until

WEIGHTS = {"w": torch.arange(6.0).view(2, 3)}
LOADED = ["pause", "load_update", "label 1:1", "resume"]
NEW = PolicyVersion(1, 1)


class Scheduler:
    """vLLM's core, as far as pausing goes."""

    def __init__(self, llm: FakeVllm) -> None:
        self._llm = llm

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self._llm.modes.append((mode, clear_cache))
        await self._llm.does("pause")


class FakeVllm:
    """Writes down what it was asked; `failing` says how often a part raises, `silent` which part never answers."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.modes: list[tuple[str, bool]] = []
        self.infos: list[dict[str, Any]] = []
        self.loaded: list[bytes] = []
        self.failing: dict[str, int] = {}
        self.silent = ""
        self.unread: list[Sequence[str]] = [(), ()]
        """The tensors that each worker has not read."""
        self.errored = False
        self.engine_core = Scheduler(self)
        self.completion: Any = None
        """What it gives to a prompt, or raises."""
        self.asked: list[tuple[dict[str, Any], Any]] = []

    async def does(self, what: str) -> None:
        self.did.append(what)
        await asyncio.sleep(0)
        if what == self.silent:
            await asyncio.Event().wait()
        if self.failing.get(what):
            self.failing[what] -= 1
            raise RuntimeError(f"{what} failed in the worker")

    def load(self, info: dict[str, Any]) -> None:
        """Read what a worker would pull."""
        if "sources" in info:
            file = file_of(info, {})
            self.loaded.append(file.read(0, file.n_bytes).numpy().tobytes())

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, lora_request: Any
    ) -> AsyncIterator[Any]:
        self.asked.append((prompt, params))
        if isinstance(self.completion, Exception):
            raise self.completion
        yield SimpleNamespace(outputs=[self.completion], num_cached_tokens=4, metrics=None)

    async def collective_rpc(
        self, method: str, kwargs: dict[str, Any] | None = None
    ) -> list[tuple[str, Sequence[str]]]:
        """The answers of two workers, of which the second may fail."""
        if kwargs is not None:
            self.infos.append(kwargs["update_info"])
            self.load(kwargs["update_info"])
        try:
            await self.does(method)
        except RuntimeError as error:
            return [("", ()), (str(error), ())]
        return [("", unread) for unread in self.unread]

    async def update_weight_version(self, version: str) -> None:
        await self.does(f"label {PolicyVersion.unpack(int(version))}")

    async def resume_generation(self) -> None:
        await self.does("resume")

    async def get_weight_version(self) -> str:
        await self.does("version")
        return "1"

    def shutdown(self, timeout: float) -> None:
        """Requests that are under way get no answer any more."""


class Requests(Enum):
    """vLLM's kinds of answers."""

    FINAL_ONLY = 2


@pytest.fixture(autouse=True)
def vllms_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's module of requests without vLLM, whose import takes seconds."""
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sampling: Any = sys.modules["vllm.sampling_params"]
    sampling.SamplingParams, sampling.RequestOutputKind = SimpleNamespace, Requests


@pytest.fixture
def engine(tmp_path: Path) -> VllmEngine:
    return engine_of(tmp_path)


IMAGES: list[WeightMemory] = []
"""Those that `imaged` made, closed in the end."""


@pytest.fixture(autouse=True)
def images() -> Iterator[None]:
    yield
    while IMAGES:
        IMAGES.pop().close()


def engine_of(folder: Path, **weights: Any) -> VllmEngine:
    """Serves 1.0 to begin with; its policy has 6 numbers."""
    engine = VllmEngine(Config(weights=WeightsConfig(**weights)), folder)
    engine._llm, engine._size = FakeVllm(), PolicySize(6, tied=False)  # type: ignore[assignment]
    engine._serve(PolicyVersion(1, 0))
    return engine


def llm_of(engine: VllmEngine) -> FakeVllm:
    assert isinstance(engine._llm, FakeVllm)
    return engine._llm


def saved(value: float = 0.0) -> bytes:
    return save({"w": WEIGHTS["w"] + value})


def sent(value: float = 0.0, version: PolicyVersion = NEW) -> tuple[list[Source], int]:
    """Where an image lies, and the checksum that is not read with it."""
    return imaged(saved(value), version), 0


def imaged(data: bytes, version: PolicyVersion = NEW) -> list[Source]:
    IMAGES.append(image_of(data, version.pack()))
    return at(IMAGES[-1].path, len(data))


def files_open() -> int:
    """Files of weights that this process has open, beside the images."""
    gc.collect()  # errors that refer to the memory of which they speak
    own = Path("/proc/self/fd")
    opened = sum("baton-weights" in os.readlink(own / fd) for fd in os.listdir(own) if (own / fd).is_symlink())
    return opened - len(IMAGES)


@pytest.mark.parametrize(("kv_cache", "clear_cache"), [("recompute", True), ("keep", False)])
async def test_an_update_is_labelled_before_requests_go_on_and_their_cache_is_cleared_or_kept_as_configured(
    tmp_path: Path, kv_cache: str, clear_cache: bool
) -> None:
    engine = engine_of(tmp_path, kv_cache=kv_cache)
    preempted: list[list[str]] = []
    recorder = SimpleNamespace(preempted_by_update=lambda: preempted.append(list(llm_of(engine).did)))
    engine._recorder = recorder  # type: ignore[assignment]
    update = await engine.update_weights(NEW, *sent())
    assert (engine.serving, update.bytes, files_open()) == (NEW, len(saved()), 0)
    assert (llm_of(engine).did, llm_of(engine).loaded) == (LOADED, [saved()])
    assert llm_of(engine).modes == [("keep", clear_cache)]
    assert engine._salt == (None if clear_cache else str(NEW.pack()))
    # cleared caches preempt every request, which is said before the first of them runs again
    assert preempted == [LOADED[:2]] * clear_cache


async def test_weights_older_than_those_that_are_served_are_refused(engine: VllmEngine) -> None:
    await engine.update_weights(PolicyVersion(2, 5), *sent(version=PolicyVersion(2, 5)))
    llm_of(engine).did.clear()
    for older in (PolicyVersion(2, 4), PolicyVersion(1, 9)):
        with pytest.raises(ValueError, match=rf"version {older} are older than 2:5"):
            await engine.update_weights(older, *sent())
    assert (llm_of(engine).did, engine.serving) == ([], PolicyVersion(2, 5))
    for same_or_newer in (PolicyVersion(2, 5), PolicyVersion(3, 0)):
        await engine.update_weights(same_or_newer, *sent(version=same_or_newer))


async def test_two_updates_at_once_are_made_one_after_the_other(engine: VllmEngine) -> None:
    newer = PolicyVersion(1, 2)
    await asyncio.gather(engine.update_weights(NEW, *sent(1.0)), engine.update_weights(newer, *sent(2.0, newer)))
    llm = llm_of(engine)
    assert llm.did == [*LOADED, *LOADED[:2], "label 1:2", "resume"]
    assert llm.loaded == [saved(1.0), saved(2.0)]
    assert engine.serving == PolicyVersion(1, 2)


async def test_a_tensor_that_no_worker_reads_fails_the_update_and_the_engine_stays_paused(engine: VllmEngine) -> None:
    llm = llm_of(engine)
    llm.unread = [["a", "b"], ["a"]]
    with pytest.raises(RunFailed, match=r"read nothing of 1 tensors, as a$"):
        await engine.update_weights(NEW, *sent())
    assert llm.did == LOADED[:2]
    llm.unread = [["a"], ["b"]]  # each worker has other experts
    await engine.update_weights(PolicyVersion(1, 2), *sent(version=PolicyVersion(1, 2)))


async def test_weights_that_are_replaced_while_an_engine_loads_leave_it_paused_for_the_newer_ones(
    engine: VllmEngine,
) -> None:
    llm, newer = llm_of(engine), PolicyVersion(1, 2)
    sources, _ = sent(1.0)
    llm.failing = {"load_update": 2}

    async def replaced() -> None:
        await until(lambda: "load_update" in llm.did)
        memory = IMAGES[-1]  # as a rank replaces what is in one of its buffers
        memory.octets().numpy()[:] = np.frombuffer(saved(2.0), np.uint8)
        memory.mark(newer.pack())

    replacing = asyncio.ensure_future(replaced())
    with pytest.raises(WeightsGone, match=f"version {newer.pack()}, not {NEW.pack()}"):
        await engine.update_weights(NEW, sources, 0)
    await replacing
    assert (engine.serving, files_open()) == (PolicyVersion(1, 0), 0)
    assert not {"resume", "label 1:1"} & set(llm.did)
    await engine.update_weights(newer, sources, 0)
    assert (llm.loaded[-1], llm.did[-2:], engine.serving) == (saved(2.0), ["label 1:2", "resume"], newer)


@pytest.mark.parametrize(
    ("part", "end", "why"),
    [
        *(
            (part, lambda engine: setattr(engine._llm, "errored", True), "core died")
            for part in ("pause", "load_update")
        ),
        ("resume", VllmEngine.stop, "is stopped"),
    ],
)
async def test_an_engine_that_dies_or_is_stopped_amid_an_update_says_so_though_its_core_never_answers(
    engine: VllmEngine, part: str, end: Callable[[VllmEngine], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.engine.vllm_engine, "CHECK_SECONDS", 0.01)
    llm = llm_of(engine)
    llm.silent = part
    updating = asyncio.ensure_future(engine.update_weights(NEW, *sent()))
    await until(lambda: part in llm.did)
    assert not (await asyncio.wait([updating], timeout=0.05))[0], "it may yet answer"
    end(engine)
    for update in (updating, engine.update_weights(NEW, *sent())):
        with pytest.raises(RunFailed, match=why):
            await asyncio.wait_for(update, 60)
    assert files_open() == 0


async def test_an_engine_that_does_not_answer_in_time_fails_its_check(engine: VllmEngine) -> None:
    await engine.check(60)
    llm_of(engine).silent = "version"
    with pytest.raises(RunFailed, match="did not answer within 0 s"):
        await engine.check(0.05)
    llm_of(engine).silent, llm_of(engine).failing = "", {"version": 1}
    llm_of(engine).errored = True
    with pytest.raises(RunFailed, match="the engine core died"):
        await engine.check(60)


async def test_a_call_that_fails_in_the_core_fails_the_engine(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker dies in an update, which vLLM notices later."""

    async def fails(method: str, kwargs: Any) -> None:
        raise Exception(f"Call to {method} method failed: cancelled")

    monkeypatch.setattr(llm_of(engine), "collective_rpc", fails)
    with pytest.raises(RunFailed, match="the engine core failed: Call to load_update method failed"):
        await engine.update_weights(NEW, *sent())


async def test_what_a_trainer_shares_is_checked_and_its_handles_reach_the_worker(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, transport="ipc")
    message = {"tensors": [["w", "bfloat16", [2, 3]]], "gpu": "0b4a", "handles": [{"storage_handle": "07"}]}
    data = json.dumps(message).encode()
    with pytest.raises(ValueError, match="have the checksum"):
        await engine.update_weights(NEW, data, 1)
    assert llm_of(engine).did == []
    update = await engine.update_weights(NEW, data, xxhash.xxh3_64_intdigest(data))
    assert llm_of(engine).did == LOADED
    assert update.bytes == 12
    (info,) = llm_of(engine).infos
    assert info == message


A, B = "base_model.model.layers.0.mlp.up_proj.lora_A.weight", "base_model.model.layers.0.mlp.up_proj.lora_B.weight"
ADAPTER = {A: torch.arange(6.0).view(2, 3), B: torch.arange(8.0).view(4, 2)}


def by(transport: str, data: bytes) -> tuple[list[Source] | bytes, int]:
    """What an engine is given of these data, and a checksum."""
    return (imaged(data), 0) if transport == "memory" else (data, xxhash.xxh3_64_intdigest(data))


def engine_with_adapter(folder: Path, **weights: Any) -> VllmEngine:
    """Serves 1.0 to begin with; its policy has an adapter of rank 2 on a layer from 3 to 4 numbers."""
    engine = engine_of(folder, **weights)
    engine._size = PolicySize(14, tied=False, adapter={A: (2, 3), B: (4, 2)})
    engine._adapter = SimpleNamespace(lora_int_id=ADAPTER_ID)  # type: ignore[assignment]
    return engine


async def test_an_adapter_takes_the_same_way(tmp_path: Path) -> None:
    engine = engine_with_adapter(tmp_path, transport="ipc")
    update = await engine.update_weights(NEW, *by("ipc", encode_announcement(ADAPTER, gpu="0b", handles=[{}, {}])))
    llm = llm_of(engine)
    assert (llm.did, [*map(set, llm.infos)]) == (LOADED, [{"tensors", "gpu", "handles"}])
    assert llm.modes == [("keep", True)] and engine.serving == NEW
    assert update.bytes == sum(tensor.nbytes for tensor in ADAPTER.values())


@pytest.mark.parametrize(
    "tensors",
    [{A: ADAPTER[A]}, ADAPTER | {B: ADAPTER[B].T.contiguous()}, ADAPTER | {"norm.weight": torch.ones(4)}, WEIGHTS],
    ids=["missing", "turned", "more", "other"],
)
@pytest.mark.parametrize("transport", ["memory", "ipc"])
async def test_another_adapter_than_the_policys_never_pauses_the_engine(
    tmp_path: Path, tensors: dict[str, torch.Tensor], transport: str
) -> None:
    engine = engine_with_adapter(tmp_path, transport=transport)
    data = save(tensors) if transport == "memory" else encode_announcement(tensors)
    with pytest.raises(ValueError, match="differ from those of the policy's adapter in "):
        await engine.update_weights(NEW, *by(transport, data))
    assert (llm_of(engine).did, engine.serving, files_open()) == ([], PolicyVersion(1, 0), 0)


# -- turns ------------------------------------------------------------------------------------------------------------

PROMPT = np.arange(3, 8, dtype=np.int32)


def completion(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "token_ids": [9, 8, 2],
        "logprobs": SimpleNamespace(logprobs=[-0.1, -0.2, -0.3]),
        "weight_versions": [SimpleNamespace(version="7", start=0, end=3)],
        "finish_reason": "stop",
        "stop_reason": None,
        "routed_experts": None,
    }
    return SimpleNamespace(**(values | changed))


def span(version: int, start: int, end: int) -> SimpleNamespace:
    return SimpleNamespace(version=str(version), start=start, end=end)


async def answered(engine: VllmEngine, **changed: Any) -> Generation:
    llm_of(engine).completion = completion(**changed)
    return await engine.generate(PROMPT, Sampling(max_tokens=4), "r")


async def test_every_token_has_its_log_probability_and_the_version_that_sampled_it(engine: VllmEngine) -> None:
    generation = await answered(engine, weight_versions=[span(7, 0, 1), span(8, 1, 3)])
    assert generation.token_ids.tolist() == [9, 8, 2]
    assert generation.logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert generation.versions.tolist() == [7, 8, 8]
    assert (await answered(engine)).versions.tolist() == [7, 7, 7]
    gap = await answered(engine, weight_versions=[span(7, 0, 1), span(8, 2, 3)])
    assert gap.versions.tolist() == [7, NO_VERSION, 8], "a token between two spans has no version"
    assert validate_generation(generation, len(PROMPT), max_tokens=4, vocab_size=10) is None
    assert engine.cached_tokens == 12


@pytest.mark.parametrize(
    ("finish", "stop", "ended"),
    [("stop", None, True), ("stop", 2, True), ("stop", "</answer>", False), ("length", None, False)],
)
async def test_an_end_was_sampled_unless_a_string_or_a_limit_made_it(
    engine: VllmEngine, finish: str, stop: Any, ended: bool
) -> None:
    generation = await answered(engine, finish_reason=finish, stop_reason=stop)
    assert (generation.stop_reason, generation.sampled_end) == (finish, ended)
    ((prompt, params),) = llm_of(engine).asked
    assert prompt == {"type": "token", "prompt_token_ids": PROMPT.tolist()}
    assert (params.max_tokens, params.logprobs, params.output_kind) == (4, 0, Requests.FINAL_ONLY)


async def test_an_error_of_vllm_is_itself_unless_the_core_died_of_it(engine: VllmEngine) -> None:
    llm = llm_of(engine)
    llm.completion = ValueError("prompt too long")
    with pytest.raises(ValueError, match="prompt too long"):
        await engine.generate(PROMPT, Sampling(4), "r")
    llm.errored = True
    with pytest.raises(RunFailed, match="the engine core died"):
        await engine.generate(PROMPT, Sampling(4), "r")
    assert engine.running == 0


@pytest.mark.parametrize(("top_k", "asked"), [(0, 521), (20, 29)])
async def test_the_engine_samples_with_the_settings_and_not_from_the_likeliest_tokens_alone(
    engine: VllmEngine, top_k: int, asked: int
) -> None:
    engine._vocab_size, llm_of(engine).completion = 2000, completion(token_ids=[], logprobs=None)
    await engine.generate(PROMPT, Sampling(4, top_p=0.9, top_k=top_k), "r")
    await engine.generate(PROMPT, Sampling(4, top_p=0.9, top_k=top_k, with_supports=False), "r")
    off = await engine.generate(PROMPT, Sampling(4, top_p=1.0, top_k=0, min_p=0.0), "r")
    (_, params), (_, without), (_, whole) = llm_of(engine).asked
    assert (params.top_k, params.top_p, params.logprobs) == (top_k, 0.9, asked)
    assert (without.top_k, without.top_p, without.logprobs) == (top_k, 0.9, 0)
    assert (whole.logprobs, off.support_size, off.support) == (0, None, None)


def test_the_support_of_a_token_is_what_the_engine_could_have_drawn() -> None:
    out = -np.inf
    ids = np.array([[5, 7, 5, 2], [3, 3, 9, 8], [1, 4, 6, 0]], np.int32)  # the drawn token, then the likeliest
    logprobs = np.array([[-1, -0.5, -1, out], [0, 0, out, out], [-9, -1, -2, -3]], np.float32)
    sizes, others = supports(ids, logprobs, 1000)
    assert (sizes.tolist(), others[:1].tolist(), others.dtype) == ([2, 1, MAX_SUPPORT + 1], [7], np.uint16)
    sizes, others = supports(ids[2:], np.where(ids[2:] == 6, out, logprobs[2:]), 1 << 17)
    assert (sizes.tolist(), others.tolist(), others.dtype) == ([3], [0, 4], np.int32)


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "head_dim": 4,
    "vocab_size": 10,
}
RECORDED = len(WARM_UP) + 3 - 1
"""Tokens of the warm-up whose experts are recorded: all but the last of three that are generated."""


def mixture_in(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    (folder / "model.safetensors").write_bytes(save(WEIGHTS))


async def start_on_gpu(engine: VllmEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
    """Start an engine on a mixture of experts, which records experts of this shape."""
    mixture_in(folder)
    engine._model_folder = folder
    experts = None if shape is None else np.zeros(shape, np.int16)
    llm = FakeVllm()
    llm.completion = completion(routed_experts=experts)
    monkeypatch.setattr(actors.engine.vllm_arguments, "on_gpu", lambda: True)
    monkeypatch.setattr(actors.engine.vllm_engine, "build", lambda arguments, with_load: (llm, None))
    await engine.start(PolicyVersion(0, 0))


async def test_settings_that_vllm_refuses_are_one_line_that_reaches_the_driver(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: Any, with_load: bool) -> None:
        pydantic.TypeAdapter(Annotated[int, pydantic.AfterValidator(four_heads_in_three)]).validate_python(4)

    def four_heads_in_three(heads: int) -> int:
        raise ValueError(f"{heads} heads in 3 parts")

    mixture_in(tmp_path)
    engine._model_folder = tmp_path
    monkeypatch.setattr(actors.engine.vllm_engine, "build", refuse)
    with pytest.raises(UserError, match=rf"^generator: vLLM refuses the settings for {tmp_path}: 4 heads in 3 parts$"):
        await engine.start(PolicyVersion(0, 0))


async def test_engines_of_a_run_draw_different_random_numbers_and_the_first_those_of_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def note(arguments: Any, with_load: bool) -> None:
        seeds.append(arguments["seed"])
        raise RunFailed("noted")

    mixture_in(tmp_path)
    monkeypatch.setattr(actors.engine.vllm_engine, "build", note)
    for number in range(3):
        with pytest.raises(RunFailed, match="noted"):
            await VllmEngine(Config(run=RunConfig(seed=5)), tmp_path, number).start(PolicyVersion(0, 0))
    assert seeds[0] == 5 and len({*seeds}) == 3


async def test_a_core_that_dies_amid_the_start_is_said_at_once(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(llm: FakeVllm, method: str) -> None:
        llm.errored = True
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeVllm, "collective_rpc", dies)
    monkeypatch.setattr(actors.engine.vllm_engine, "CHECK_SECONDS", 0.01)
    with pytest.raises(RunFailed, match="the engine core died"):
        await asyncio.wait_for(start_on_gpu(engine, tmp_path, monkeypatch, None), 60)


@pytest.mark.parametrize("layers", [2, 3])
async def test_an_engine_whose_recorded_experts_the_trainer_can_replay_starts(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    await start_on_gpu(engine, tmp_path, monkeypatch, (RECORDED, layers, 2))
    assert engine.serving == PolicyVersion(0, 0)
    said = await engine.generate(PROMPT, Sampling(max_tokens=4), "r")
    assert said.routed_experts is not None and said.routed_experts.dtype == np.uint8, "the model has few experts"


@pytest.mark.parametrize("shape", [None, (RECORDED, 1, 2), (RECORDED, 3, 1), (RECORDED + 1, 3, 2), (3, 3, 2)])
async def test_an_engine_that_records_other_experts_than_the_trainer_replays_fails_at_its_start(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: Any
) -> None:
    with pytest.raises(RunFailed, match=r"replays 2 experts in 3 or 2 layers .*VLLM_USE_V2_MODEL_RUNNER") as failed:
        await start_on_gpu(engine, tmp_path, monkeypatch, shape)
    assert str(() if shape is None else shape) in str(failed.value)
