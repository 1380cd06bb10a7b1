"""vLLM beside the learner: tests that need a GPU, then log-probabilities of the same tokens by vLLM and the learner."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.gpu import suite
from benchmarks.gpu.figures import Figures, Range, line
from benchmarks.gpu.parts import Give
from benchmarks.gpu.small_engine import INPUT_TOKENS, OUTPUT_TOKENS, SMALL, VOCABULARY, sampled, settings, write_model
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.engine import Sampling

SHAPES = {
    "cuda": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "cpu": SMALL,
}
TURNS = {"cuda": 64, "cpu": 4}
RESPONSE = {"cuda": OUTPUT_TOKENS - 1, "cpu": 8}
DTYPES: dict[str, Literal["bfloat16", "float32"]] = {"cuda": "bfloat16", "cpu": "float32"}
WEIGHTS = "tests/gpu/test_weights.py::test_engine_and_trainer_agree_after_weights_were_shared_on_a_gpu[weights]"
ROUNDING = 2.0**-9
"""Relative rounding error of bfloat16. The errors of the layers add up, so a log-probability differs by several."""


def measure(device: str, give: Give) -> None:
    """Run the tests of routed experts and of weights by CUDA IPC, then measure the differences of log-probabilities."""
    suite.run(give, "tests/gpu/test_experts.py", WEIGHTS)
    # in a separate process, because an engine's environment has to be set before vLLM is imported
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        give(apart.submit(_agreement, device).result())


def _agreement(device: str) -> Figures:
    config = settings(DTYPES[device])
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHAPES[device])
        rng = np.random.default_rng(0)
        lengths = rng.integers(INPUT_TOKENS // 8, INPUT_TOKENS, TURNS[device])
        prompts = [rng.integers(1, VOCABULARY - 1, length).astype(np.int32) for length in lengths]
        sampling = Sampling(max_tokens=RESPONSE[device], temperature=0.7)
        batch, of_engine = asyncio.run(sampled(config, model, prompts, sampling))
        policy = Policy(LearnSettings.of(config), model, torch.device(device), 0, 1)
        of_trainer = policy.logprobs([policy.to_device(batch)])[0].cpu().numpy()
    differences = np.abs(of_trainer - of_engine)
    note = f"{len(differences)} tokens in {DTYPES[device]}, largest {differences.max():.4f}"
    root = float(np.sqrt(np.mean(differences**2)))
    # at least one rounding, at most those of all layers as if they were independent
    limits = Range(ROUNDING, ROUNDING * SHAPES[device].num_layers ** 0.5 / 0.7)
    return line("engine against trainer, root mean square", root, "nats", limits, note)
