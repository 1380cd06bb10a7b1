"""Log-probabilities of sampled tokens: those of the engine, against those of the trainer on the same weights.

Without quantization both differ by rounding only; `weights.verify` counts the tokens beyond `verify_tolerance`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks.gpu.parts import Give
from benchmarks.gpu.small_engine import INPUT_TOKENS, OUTPUT_TOKENS, SMALL, VOCABULARY, sampled, settings, write_model
from service.config.tree import Config, MakeModelConfig
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.engine import Sampling
from service.types import MicroBatch

SHAPES = {
    "cuda": MakeModelConfig(
        hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    "cpu": SMALL,
}
TURNS = {"cuda": 64, "cpu": 4}
RESPONSE = {"cuda": OUTPUT_TOKENS - 1, "cpu": 8}
TEMPERATURE = 0.7
DTYPES: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")
TOLERANCES = (1e-3, 1e-1)
"""Nats: that of `weights.verify_tolerance`, and the one that its documentation names for bfloat16."""


def measure(device: str, give: Give) -> None:
    """In each type: an engine samples turns, and a policy computes them again."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHAPES[device])
        for dtype in DTYPES:
            config = settings(dtype)
            batch, of_engine = asyncio.run(_sampled(config, model, device))
            policy = Policy(LearnSettings.of(config), model, torch.device(device), 0, 1)
            of_trainer = policy.logprobs([policy.to_device(batch)])[0].cpu().numpy()
            differences = np.abs(of_trainer - of_engine)
            give(
                {
                    "dtype": dtype,
                    "tokens": len(differences),
                    "root_mean_square": float(np.sqrt(np.mean(differences**2))),
                    "largest": float(differences.max()),
                    **{f"beyond_{limit:g}": float(np.mean(differences > limit)) for limit in TOLERANCES},
                }
            )
            del policy


async def _sampled(config: Config, model: Path, device: str) -> tuple[MicroBatch, np.ndarray]:
    """Turns as rows of one micro-batch, and the engine's log-probabilities of the sampled tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(INPUT_TOKENS // 8, INPUT_TOKENS, TURNS[device])
    prompts = [rng.integers(1, VOCABULARY - 1, length).astype(np.int32) for length in lengths]
    sampling = Sampling(max_tokens=RESPONSE[device], temperature=TEMPERATURE)
    return await sampled(config, model, prompts, sampling)
