"""The engine against a Hugging Face forward pass of the same weights, before, during and after updates."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
import xxhash
from safetensors.torch import load_file, save, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.engine.engine_load import EngineLoad
from actors.engine.vllm_engine import VllmEngine, WeightUpdate, engine_env
from actors.weights.pulled import WeightFile
from service.config import AlgorithmConfig, Config, GeneratorConfig, ModelConfig, WeightsConfig
from service.errors import RunFailed
from service.rollout.engine import Generation, Sampling, validate_generation
from service.types import PolicyVersion
from tests.pure.actors.fakes import at, image_of
from tests.waiting import until

pytestmark = pytest.mark.slow

VOCABULARY = 80
END = 2
LETTERS = "Ġ" + "".join(map(chr, range(ord("!"), ord("!") + 39)))
"""The tokens of a tokenizer; the first is a space."""
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
CONFIG = Config(
    model=ModelConfig(dtype="float32"),
    generator=GeneratorConfig(max_input_length=64, max_generate_length=256, concurrent_groups=8),
    algorithm=AlgorithmConfig(n_samples_per_prompt=8),
    weights=WeightsConfig(kv_cache="recompute"),
)
ATOL = 1e-4


def dense(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).float().eval()


def mixture(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    shape = SHAPE | experts | {"tie_word_embeddings": False}  # untied, so that nothing but the experts is at stake
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).float().eval()


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As they travel: a tied head is not sent beside its embedding."""
    tied = model.config.tie_word_embeddings
    return {name: t.contiguous() for name, t in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def update(engine: Any, step: int, weights: dict[str, torch.Tensor]) -> Any:
    data = save(weights)
    return engine.update_weights.remote(
        PolicyVersion(1, step), np.frombuffer(data, np.uint8), xxhash.xxh3_64_intdigest(data)
    )


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, 12).astype(np.int32)


def logprobs(
    model: PreTrainedModel, prompt_ids: np.ndarray, response_ids: np.ndarray, temperature: float
) -> np.ndarray:
    """What the model gives the response, in one forward pass over all of it."""
    token_ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, token_ids[len(prompt_ids) :, None])[:, 0].numpy()


def difference(model: PreTrainedModel, prompt_ids: np.ndarray, generation: Generation, temperature: float) -> float:
    assert generation.logprobs is not None
    expected = logprobs(model, prompt_ids, generation.token_ids, temperature)
    return float(np.abs(expected - generation.logprobs).max())


class Observed(VllmEngine):
    """Shows the engine's load to other processes, and takes weights from them as the bytes of a file."""

    async def update_weights(self, version: PolicyVersion, data: Any, checksum: int) -> WeightUpdate:
        if isinstance(data, list) or self._config.weights.transport != "memory":
            return await super().update_weights(version, data, checksum)
        image = image_of(data, version.pack())
        try:
            return await super().update_weights(version, at(image.path, len(data)), 0)
        finally:
            image.close()

    async def fail_at(self, part: str, ranks: list[int], times: int) -> None:
        """See `FailingWorker`."""
        await self._running().collective_rpc("fail_at", args=(part, ranks, times))

    async def leave_out(self, name: str, ranks: list[int]) -> None:
        """See `FailingWorker`."""
        await self._running().collective_rpc("leave_out", args=(name, ranks))

    async def pid(self) -> int:
        return os.getpid()

    async def look(self) -> EngineLoad | None:
        return self.load

    async def under_way(self) -> int:
        return self.running

    async def generate_within(self, prompt_ids: np.ndarray, sampling: Sampling, seconds: float) -> Generation | None:
        """A turn, or None where it was given up at its deadline."""
        try:
            async with asyncio.timeout(seconds):
                return await self.generate(prompt_ids, sampling, "deadline")
        except TimeoutError:
            return None


def made(folder: Path, model: PreTrainedModel, config: Config = CONFIG, kind: type[VllmEngine] = Observed) -> Any:
    """An engine that is not started."""
    model.save_pretrained(folder)
    options: dict[str, Any] = {"num_cpus": 1, "runtime_env": {"env_vars": engine_env(config.generator)}}
    return ray.remote(kind).options(max_concurrency=100, **options).remote(config, folder)


def started(*arguments: Any) -> Any:
    engine = made(*arguments)
    ray.get(engine.start.remote(PolicyVersion(1, 0)))
    return engine


@contextmanager
def serving(*arguments: Any) -> Iterator[Any]:
    """An engine as `started` makes it, to its orderly end."""
    engine = started(*arguments)
    yield engine
    ray.get(engine.stop.remote())
    ray.kill(engine)


WORKERS = [1, pytest.param(2, marks=pytest.mark.full)]
"""Numbers of an engine's workers."""


def of_workers(config: Config, workers: int, **options: Any) -> Config:
    """The configuration of engines with so many workers, and these settings of the generator."""
    generator = config.generator.model_copy(update={"tensor_parallel_size": workers, **options})
    return config.model_copy(update={"generator": generator})


@pytest.fixture(scope="module", params=WORKERS)
def engine(request: pytest.FixtureRequest, local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serves `dense(0)` as version 1.0 to begin with; its tokenizer has fewer tokens than its head has rows, and its
    folder stores the tied head too."""
    folder = tmp_path_factory.mktemp("dense")
    letters = Tokenizer(BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    letters.decoder = ByteLevel()
    letters.save(str(folder / "tokenizer.json"))
    # With this class transformers would decode other texts.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    engine = made(folder, dense(0), of_workers(CONFIG, request.param, stop=["never said"]))
    head = {"lm_head.weight": dense(0).lm_head.weight.detach().clone()}
    save_file(weights_of(dense(0)) | head, folder / "model.safetensors", {"format": "pt"})
    ray.get(engine.start.remote(PolicyVersion(1, 0)))
    yield engine
    ray.kill(engine)


TWO, THREE, ALL = {"top_p": 0.9, "min_p": 0.02}, {"top_p": 0.8, "top_k": 9, "min_p": 0.02}, {"top_k": 500}


@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, TWO, THREE, ALL])
def test_log_probabilities_of_a_sampler_that_truncates_are_those_over_its_supports(
    engine: Any, setting: dict[str, Any]
) -> None:
    ray.get(update(engine, 0, weights_of(dense(0))))
    sampling = Sampling(max_tokens=40, temperature=0.7, stop=("never said",), **setting)
    generations = ray.get([engine.generate.remote(prompt(seed), sampling, "r") for seed in range(4)])
    for seed, generation in enumerate(generations):
        assert generation.support_size.max() <= setting.get("top_k", 79)
        assert validate_generation(generation, len(prompt(seed)), sampling.max_tokens, VOCABULARY) is None
        token_ids = torch.from_numpy(np.concatenate((prompt(seed), generation.token_ids)).astype(np.int64))
        with torch.no_grad():
            logits = dense(0)(token_ids[None]).logits[0, len(prompt(seed)) - 1 : -1] / sampling.temperature
        drawn = token_ids[len(prompt(seed)) :, None]
        left_out = torch.ones_like(logits, dtype=torch.bool).scatter(1, drawn, False)
        row = np.repeat(np.arange(len(logits)), np.maximum(generation.support_size, 1) - 1)
        left_out[row, generation.support.astype(np.int64)] = False
        expected = logits.masked_fill(left_out, -torch.inf).log_softmax(-1).gather(1, drawn)[:, 0].numpy()
        assert np.abs(expected - generation.logprobs).max() < ATOL
        assert (difference(dense(0), prompt(seed), generation, sampling.temperature) > 0.01) == (setting != ALL)


def test_at_temperature_zero_the_likeliest_tokens_come_back_also_after_the_longest_prompt(engine: Any) -> None:
    longest = np.resize(prompt(0), CONFIG.generator.max_input_length)
    sampling = Sampling(max_tokens=CONFIG.generator.max_generate_length - 1, temperature=0.0)
    first, again = ray.get([engine.generate.remote(longest, sampling, "r") for _ in range(2)])
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert len(first.token_ids) == sampling.max_tokens or first.sampled_end
    for generation in (first, again):
        assert validate_generation(generation, len(longest), sampling.max_tokens, VOCABULARY) is None
        assert difference(dense(0), longest, generation, 1.0) < ATOL
    with torch.no_grad():
        logits = dense(0)(torch.from_numpy(longest.astype(np.int64))[None]).logits[0, -1]
    assert first.token_ids[0] == logits.argmax()


def test_a_turn_ends_at_a_sampled_end_or_at_its_length_and_says_which(engine: Any) -> None:
    ends = tuple(range(3, VOCABULARY, 2))
    ended = ray.get(engine.generate.remote(prompt(0), Sampling(max_tokens=200, stop_token_ids=ends), "r"))
    cut = ray.get(engine.generate.remote(prompt(0), Sampling(max_tokens=1), "r"))
    assert (ended.stop_reason, ended.sampled_end) == ("stop", True)
    assert ended.token_ids[-1] in (*ends, END) and not set(ended.token_ids[:-1].tolist()) & {*ends, END}
    assert len(cut.token_ids) == 1 and (cut.stop_reason, cut.sampled_end) in (("length", False), ("stop", True))


def test_a_stop_text_is_found_in_the_text_that_tokenizer_json_gives(engine: Any) -> None:
    sampling = Sampling(max_tokens=200, temperature=2.0, stop=(" ",))
    turns = ray.get([engine.generate.remote(prompt(seed), sampling, "r") for seed in range(8)])
    spaces = [turn.token_ids.tolist().index(0) for turn in turns if 0 in turn.token_ids]
    stopped = [turn for turn in turns if turn.stop_reason == "stop" and not turn.sampled_end]
    assert spaces == [len(turn.token_ids) - 1 for turn in stopped] != []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_after_an_update_a_tied_head_computes_with_the_new_weights(engine: Any, temperature: float) -> None:
    cost = ray.get(update(engine, 1, weights_of(dense(1))))
    generation = ray.get(engine.generate.remote(prompt(1), Sampling(max_tokens=40, temperature=temperature), "r"))
    assert difference(dense(1), prompt(1), generation, temperature) < ATOL
    assert difference(dense(0), prompt(1), generation, temperature) > 0.1
    assert set(generation.versions.tolist()) == {PolicyVersion(1, 1).pack()}
    assert cost.bytes > 1e6 and cost.pause_seconds > 0


def test_a_token_sampled_before_an_update_has_the_old_version_and_one_after_it_the_new(engine: Any) -> None:
    policies = [dense(2), dense(3)]
    ray.get(update(engine, 2, weights_of(policies[0])))
    crossed = 0
    # How far the requests are when the update comes is the machine's affair, so it is tried until it comes amid them.
    for step in range(3, 43):
        requests = [engine.generate.remote(prompt(i), Sampling(max_tokens=255), f"r{i}") for i in range(32)]
        time.sleep(0.02 * (step - 3))
        before_it, after_it = policies if step % 2 else policies[::-1]
        ray.get(update(engine, step, weights_of(after_it)))
        old, new = PolicyVersion(1, step - 1).pack(), PolicyVersion(1, step).pack()
        for i, generation in enumerate(ray.get(requests)):
            before = int((generation.versions == old).sum())
            assert generation.versions.tolist() == [old] * before + [new] * (len(generation.versions) - before)
            expected = np.where(
                np.arange(len(generation.token_ids)) < before,
                logprobs(before_it, prompt(i), generation.token_ids, 1.0),
                logprobs(after_it, prompt(i), generation.token_ids, 1.0),
            )
            assert np.abs(expected - generation.logprobs).max() < ATOL
            crossed += 0 < before < len(generation.versions)
        if crossed:
            break
    assert crossed > 0


@pytest.mark.full
def test_turns_that_are_given_up_amid_updates_leave_nothing_behind(engine: Any) -> None:
    weights = [weights_of(dense(0)), weights_of(dense(1))]
    sampling = Sampling(max_tokens=255, stop_token_ids=())
    deadlines = [0.02 * (i + 1) for i in range(40)]
    turns = [engine.generate_within.remote(prompt(i), sampling, seconds) for i, seconds in enumerate(deadlines)]
    for step in range(100, 106):
        ray.get(update(engine, step, weights[step % 2]))
    assert None in ray.get(turns)
    assert ray.get(engine.under_way.remote()) == 0
    generation = ray.get(engine.generate.remote(prompt(1), Sampling(max_tokens=40), "r"))
    assert difference(dense(1), prompt(1), generation, 1.0) < ATOL
    assert set(generation.versions.tolist()) == {PolicyVersion(1, 105).pack()}


def test_an_engine_never_resumes_on_weights_that_were_loaded_in_part(engine: Any) -> None:
    """In the midst of a layer, which vLLM would else complete with tensors of the next update."""
    weights = weights_of(dense(1))
    renamed = {name.replace("layers.1.self_attn.v_", "layers.1.self_attn.lost_"): w for name, w in weights.items()}
    with pytest.raises(RunFailed, match=r"not loaded in 2 tries: .*lost_proj"):
        ray.get(update(engine, 112, renamed))
    request = engine.generate.remote(prompt(1), Sampling(max_tokens=20), "r")
    assert ray.wait([request], timeout=1.0)[0] == []
    ray.get(update(engine, 113, weights))
    generation = ray.get(request)
    assert difference(dense(1), prompt(1), generation, 1.0) < ATOL
    assert set(generation.versions.tolist()) == {PolicyVersion(1, 113).pack()}


def processes_of(engine: Any) -> list[psutil.Process]:
    """The engine's process, its core and its workers."""
    owner = psutil.Process(ray.get(engine.pid.remote()))
    return [owner, *owner.children(recursive=True)]


def names_in_shared_memory(engine: Any) -> list[str]:
    """What the engine's processes have open and what would stay if they were killed."""
    lines = [line for each in processes_of(engine) for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
    return [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]


def core_of(engine: Any) -> tuple[psutil.Process, psutil.Process]:
    """The engine's process and that of its core."""
    owner = psutil.Process(ray.get(engine.pid.remote()))
    (core,) = [child for child in owner.children() if "EngineCore" in " ".join(child.cmdline())]
    return owner, core


def test_a_core_that_dies_amid_an_update_is_said_at_once(engine: Any) -> None:
    """vLLM itself never answers a call that its core took along."""
    _, core = core_of(engine)
    core.suspend()
    updating = update(engine, 114, weights_of(dense(0)))
    assert ray.wait([updating], timeout=1.0)[0] == []
    core.kill()
    with pytest.raises(RunFailed, match="the engine core died"):
        ray.get(updating, timeout=120)


def test_after_an_update_that_failed_in_some_workers_all_of_them_take_the_next(local_ray: None, tmp_path: Path) -> None:
    options = {"worker_extension_cls": "tests.e2e.failing_worker.FailingWorker"}
    with serving(tmp_path, dense(0), of_workers(CONFIG, 2, engine_options=options)) as engine:
        assert names_in_shared_memory(engine) == []
        ray.get(engine.leave_out.remote("model.norm.weight", [1]))
        with pytest.raises(RunFailed, match=r"nothing was loaded into 1 parameters .* model\.norm\.weight"):
            ray.get(update(engine, 1, weights_of(dense(1))))
        ray.get(engine.leave_out.remote("", [1]))
        failures = [("receive_weights", [0], 1), ("receive_weights", [1], 2), ("finish_weight_update", [0, 1], 2)]
        for step, (part, ranks, times) in enumerate(failures, 1):
            ray.get(engine.fail_at.remote(part, ranks, times))
            if times > 1:
                with pytest.raises(RunFailed, match=f"in 2 tries: WeightsGone: {part} of {ranks[0]}"):
                    ray.get(update(engine, step, weights_of(dense(9))))
            ray.get(update(engine, step, weights_of(dense(step))))
            generation = ray.get(engine.generate.remote(prompt(step), Sampling(max_tokens=40), "r"))
            assert difference(dense(step), prompt(step), generation, 1.0) < ATOL
            assert set(generation.versions.tolist()) == {PolicyVersion(1, step).pack()}


@pytest.mark.full
def test_an_engine_that_ray_ends_amid_its_start_leaves_no_name_in_shared_memory(
    local_ray: None, tmp_path: Path
) -> None:
    def names() -> set[Path]:
        return {*Path("/dev/shm").glob("psm_*")}

    engine, before = made(tmp_path, dense(0), of_workers(CONFIG, 2)), names()
    engine.start.remote(PolicyVersion(1, 0))
    own = until(lambda: names() - before)
    ray.kill(engine)
    until(lambda: not own & names())


@pytest.mark.full
def test_loading_many_small_tensors_again_pauses_half_as_long_as_the_first_time(
    local_ray: None, tmp_path: Path
) -> None:
    """18,867 tensors, as of 48 layers with 128 experts each."""
    shape = SHAPE | {"num_hidden_layers": 48, "hidden_size": 64, "tie_word_embeddings": False}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).float().eval()
    with serving(tmp_path, model) as engine:
        pauses: dict[bool, list[float]] = {True: [], False: []}
        for step in range(2, 10):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            model.save_pretrained(tmp_path)
            # With another header vLLM looks for each tensor's layer as at first.
            data = save(load_file(tmp_path / "model.safetensors"), metadata={"number": f"{step // 2}"})
            sent = np.frombuffer(data, np.uint8), xxhash.xxh3_64_intdigest(data)
            updated = ray.get(engine.update_weights.remote(PolicyVersion(1, step), *sent))
            pauses[step % 2 == 1].append(updated.pause_seconds)
            generation = ray.get(engine.generate.remote(prompt(0), Sampling(max_tokens=20), "r"))
            assert difference(model, prompt(0), generation, 1.0) < ATOL
    print(pauses)
    assert 2 * np.median(pauses[True]) <= np.median(pauses[False])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_calls_of_loaders_are_repeated_only_where_they_copied_every_tensor_and_no_value_was_read() -> None:
    from vllm.model_executor.model_loader.reload.layerwise import (
        get_layerwise_info,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    from actors.engine.loader_calls import LoaderCalls

    data = save({"weight": torch.ones(2, 3)})
    image = image_of(data)

    def repeatable(load: Callable[[Any, torch.Tensor], object]) -> bool:
        layer = torch.nn.Linear(3, 2, bias=False)
        record_metadata_for_reloading(layer)
        initialize_layerwise_reload(layer)
        calls = LoaderCalls(layer)
        file = WeightFile(0, at(image.path, len(data)))
        ((_, tensor),) = file.tensors()
        load(layer.weight, tensor)
        calls.finish(file)
        assert not calls.header or get_layerwise_info(layer).load_numel == 0, "the layer is complete"
        return calls.header == file.header

    assert repeatable(lambda weight, tensor: weight.weight_loader(weight, tensor))
    assert not repeatable(lambda weight, tensor: weight.weight_loader(weight, tensor * 1))
    assert not repeatable(lambda weight, tensor: (weight.weight_loader(weight, tensor), tensor.sum()))
    assert not repeatable(lambda weight, tensor: None)
    image.close()


@pytest.fixture(scope="module", params=[1, 2])
def small_engine(
    request: pytest.FixtureRequest, local_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A mixture of experts, whose KV cache holds hardly more than its longest request and is kept over updates."""
    config = of_workers(CONFIG, request.param, kv_cache_bytes=13 * 32 * 1024 // request.param)
    config = config.model_copy(update={"weights": WeightsConfig(kv_cache="keep")})
    engine = started(tmp_path_factory.mktemp("mixture"), mixture(0), config)
    yield engine
    ray.kill(engine)


@pytest.mark.full
def test_after_an_update_a_mixture_of_experts_computes_with_the_new_weights(small_engine: Any) -> None:
    before = ray.get(small_engine.generate.remote(prompt(0), Sampling(max_tokens=40), "r"))
    assert difference(mixture(0), prompt(0), before, 1.0) < ATOL
    ray.get(update(small_engine, 1, weights_of(mixture(1))))
    after = ray.get(small_engine.generate.remote(prompt(0), Sampling(max_tokens=40), "r"))
    assert difference(mixture(1), prompt(0), after, 1.0) < ATOL
    assert difference(mixture(0), prompt(0), after, 1.0) > 0.1


@pytest.mark.full
def test_with_a_kept_cache_no_new_prompt_continues_on_another_versions_prefix(small_engine: Any) -> None:
    ray.get(update(small_engine, 2, weights_of(mixture(0))))
    long_prompt = np.concatenate([prompt(seed) for seed in range(5)])
    ray.get(small_engine.generate.remote(long_prompt, Sampling(max_tokens=2), "r"))
    ray.get(update(small_engine, 3, weights_of(mixture(1))))
    generation = ray.get(small_engine.generate.remote(long_prompt, Sampling(max_tokens=30), "r"))
    assert difference(mixture(1), long_prompt, generation, 1.0) < ATOL


@pytest.mark.full
def test_a_kv_cache_that_overflows_is_seen_and_loses_no_request(small_engine: Any) -> None:
    sampling = Sampling(max_tokens=200)
    requests = [small_engine.generate.remote(prompt(seed), sampling, f"r{seed}") for seed in range(16)]
    generations = ray.get(requests)
    assert ray.get(small_engine.look.remote()).preemptions > 0
    for seed, generation in enumerate(generations):
        assert len(generation.token_ids) == 200 or generation.token_ids[-1] == END
        assert difference(mixture(1), prompt(seed), generation, 1.0) < ATOL


@pytest.mark.full
def test_what_has_been_answered_holds_neither_a_place_in_the_engine_nor_its_kv_cache(small_engine: Any) -> None:
    """So sessions that wait for their tools cost the others nothing, however many they are."""
    before = ray.get(small_engine.look.remote()).preemptions
    for seed in range(100, 110):  # one fits at a time
        generation = ray.get(small_engine.generate.remote(prompt(seed), Sampling(max_tokens=200), f"r{seed}"))
        assert len(generation.token_ids) == 200 or generation.token_ids[-1] == END
        assert ray.get(small_engine.under_way.remote()) == 0
    assert ray.get(small_engine.look.remote()).preemptions == before


@pytest.mark.full
def test_an_engines_processes_end_with_their_owner_also_when_that_is_killed(small_engine: Any) -> None:
    owner, *others = processes_of(small_engine)
    owner.kill()
    assert psutil.wait_procs(others, timeout=60)[1] == []


@pytest.mark.full
@pytest.mark.parametrize("victim", ["EngineCore", "Worker_TP1"])
def test_of_two_engines_on_a_node_one_that_loses_a_process_is_dead_and_the_other_serves(
    local_ray: None, tmp_path: Path, victim: str
) -> None:
    config = of_workers(CONFIG, 2)
    with serving(tmp_path / "one", dense(0), config) as one, serving(tmp_path / "other", dense(1), config) as other:
        others = [process for process in processes_of(one) if "VLLM::" in " ".join(process.cmdline())]
        next(process for process in others if victim in " ".join(process.cmdline())).kill()
        assert psutil.wait_procs(others, timeout=60)[1] == []
        with pytest.raises(RunFailed, match="the engine core died"):
            ray.get(one.check.remote(60.0))
        generation = ray.get(other.generate.remote(prompt(1), Sampling(max_tokens=40), "r"))
        assert difference(dense(1), prompt(1), generation, 1.0) < ATOL
