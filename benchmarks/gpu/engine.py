"""vLLM beside the learner: tests that need a GPU, then log-probabilities of the same tokens by vLLM and the learner."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.figures import Figures, Give, Range, line
from benchmarks.gpu.parts import run_tests
from benchmarks.gpu.small_engine import INPUT_TOKENS, OUTPUT_TOKENS, SMALL, VOCABULARY, sampled, settings
from benchmarks.shapes import SHAPES
from service.learn.model.policy import Policy
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.rollout.engine import Sampling

DIMENSIONS = {"cuda": {name: SHAPES["Qwen3-0.6B"][name] for name in SMALL}, "cpu": SMALL}
TURNS = {"cuda": 64, "cpu": 4}
RESPONSE = {"cuda": OUTPUT_TOKENS - 1, "cpu": 8}
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
WEIGHTS = "tests/gpu/test_weights.py::test_engine_and_trainer_agree_after_weights_were_shared_on_a_gpu[weights]"
ROUNDING = 2.0**-9
"""Relative rounding error of bfloat16. The errors of the layers add up, so a log-probability differs by several."""


def measure(device: str, give: Give) -> None:
    """Run the tests of routed experts and of weights by CUDA IPC, then measure the differences of log-probabilities."""
    run_tests(give, "tests/gpu/test_experts.py", WEIGHTS)
    # in a separate process, because an engine's environment has to be set before vLLM is imported
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        give(apart.submit(_agreement, device).result())


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
