"""vLLM's engines: tests that need a GPU, the pause for new weights, and log-probabilities of the same tokens by vLLM
and by the learner."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.weights.memory import WeightMemory
from actors.weights.part import Source, WeightPart
from benchmarks.gpu.figures import Figures, Give, Range, line
from benchmarks.gpu.parts import run_tests
from benchmarks.gpu.small_engine import INPUT_TOKENS, OUTPUT_TOKENS, SMALL, VOCABULARY, sampled, serving, settings
from benchmarks.shapes import SHAPES
from service.learn.model.policy import Policy
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.rollout.engine import Sampling
from service.types import PolicyVersion

Result = TypeVar("Result")

DIMENSIONS = {"cuda": {name: SHAPES["Qwen3-0.6B"][name] for name in SMALL}, "cpu": SMALL}
TURNS = {"cuda": 64, "cpu": 4}
RESPONSE = {"cuda": OUTPUT_TOKENS - 1, "cpu": 8}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
UPDATES = "tests/gpu/test_weights.py::test_engine_and_trainer_agree_after_weights_were_shared_on_a_gpu"
DEATHS = "tests/gpu/test_weights.py::test_a_generator_and_a_rank_that_are_killed_come_back_to_the_gpu"
MANY = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
FEW = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
MIXTURE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MIXTURE |= {"moe_intermediate_size": 64, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
PAUSE = Range(0.0, 1.2)
"""Seconds: vLLM's loaders are called once for each tensor, in the first update twice."""
N_UPDATES = 3
ROUNDING = 2.0**-9
"""Relative rounding error of bfloat16. The errors of the layers add up, so a log-probability differs by several."""


def routing(device: str, give: Give) -> None:
    """Run the tests of routed experts, with an update while requests run."""
    run_tests(give, "tests/gpu/test_experts.py")


def ipc(device: str, give: Give) -> None:
    """Run the tests of weights and of an adapter by CUDA IPC."""
    run_tests(give, UPDATES)


def deaths(device: str, give: Give) -> None:
    """Run the test that kills a generator and a rank which share the GPU."""
    run_tests(give, DEATHS)


def pause(device: str, give: Give) -> None:
    """Measure the pauses of an engine of 128 small experts a layer, as many tensors as Qwen3-30B-A3B has."""
    for number, (tensors, seconds) in enumerate(_apart(_pauses, device)):
        expected = None if number == 0 else PAUSE
        give(line(f"update {number + 1} of {tensors} tensors: pause", seconds, "s", expected))


def agreement(device: str, give: Give) -> None:
    """Measure the differences of log-probabilities."""
    give(_apart(_agreement, device))


def _apart(work: Callable[[str], Result], device: str) -> Result:
    """Call a function in a process of its own, because an engine's environment has to be set before vLLM is
    imported."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, device).result()


def _pauses(device: str) -> list[tuple[int, float]]:
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3MoeConfig(**MIXTURE, **(MANY if device == "cuda" else FEW))
        Qwen3MoeForCausalLM(config).to(getattr(torch, DTYPES[device])).save_pretrained(folder)
        weights = {name: x for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()}
        return asyncio.run(_updated(device, Path(folder), weights))


async def _updated(device: str, folder: Path, weights: dict[str, torch.Tensor]) -> list[tuple[int, float]]:
    data = torch.frombuffer(bytearray(save(weights)), dtype=torch.uint8)
    memory = WeightMemory(len(data))
    memory.octets().copy_(data)
    source, found = Source(WeightPart(((0, len(data)),)), memory.path), list[tuple[int, float]]()
    async with serving(settings(DTYPES[device]), folder) as engine:
        for step in range(1, N_UPDATES + 1):
            version = PolicyVersion(1, step)
            memory.mark(version.pack())
            found.append((len(weights), (await engine.update_weights(version, [source], 0)).pause_seconds))
    return found


def _agreement(device: str) -> Figures:
    config = settings(DTYPES[device])
    with tempfile.TemporaryDirectory() as folder:
        model, end = Path(folder), VOCABULARY - 1  # no prompt has the token that ends a turn
        make_model(model, DIMENSIONS[device], VOCABULARY, eos_token_id=end, pad_token_id=0, seed=0)
        rng = np.random.default_rng(0)
        lengths = rng.integers(INPUT_TOKENS // 8, INPUT_TOKENS, TURNS[device])
        prompts = [rng.integers(1, end, length).astype(np.int32) for length in lengths]
        sampling = Sampling(max_tokens=RESPONSE[device], temperature=0.7)
        batch, of_engine = asyncio.run(sampled(config, model, prompts, sampling))
        policy = Policy(LearnSettings.of(config), model, torch.device(device), 0, 1)
        of_trainer = policy.logprobs([policy.to_device(batch)])[0].cpu().numpy()
    differences = np.abs(of_trainer - of_engine)
    note = f"{len(differences)} tokens in {DTYPES[device]}, largest {differences.max():.4f}"
    root = float(np.sqrt(np.mean(differences**2)))
    # at least one rounding, at most those of all layers as if they were independent
    limits = Range(ROUNDING, ROUNDING * DIMENSIONS[device]["num_hidden_layers"] ** 0.5 / 0.7)
    return line("engine against trainer, root mean square", root, "nats", limits, note)
