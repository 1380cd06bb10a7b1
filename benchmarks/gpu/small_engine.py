"""A real vLLM engine in this process, with a random model that the trainer can load too; without Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engine.vllm_arguments import engine_env
from actors.engine.vllm_engine import VllmEngine
from service.config import Config, load_config
from service.rollout.engine import Sampling
from service.types import Float64s, Int32s, MicroBatch, PolicyVersion

VOCABULARY = 32768
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
INPUT_TOKENS, OUTPUT_TOKENS = 512, 256


def settings(dtype: str) -> Config:
    """A configuration whose engine leaves most of a GPU to a rank beside it."""
    words = [f"model.dtype={dtype}", f"generator.max_input_length={INPUT_TOKENS}", "generator.enforce_eager=true"]
    words += [f"generator.max_generate_length={OUTPUT_TOKENS}", "generator.concurrent_groups=8"]
    words += [f"generator.kv_cache_bytes={1 << 30}", "generator.gpu_memory_utilization=0.35"]
    return load_config([], [*words, "algorithm.n_samples_per_prompt=8", "weights.sync_deadline=120"])


@asynccontextmanager
async def serving(config: Config, folder: Path) -> AsyncIterator[VllmEngine]:
    """The started engine. Its environment has to be set before vLLM is imported, so a process has one configuration."""
    os.environ.update(engine_env(config.generator))
    engine = VllmEngine(config, folder)
    await engine.start(PolicyVersion(1, 0))
    try:
        yield engine
    finally:
        engine.stop()


async def sampled(
    config: Config, folder: Path, prompts: Sequence[Int32s], sampling: Sampling
) -> tuple[MicroBatch, Float64s]:
    """Sampled turns as rows of one micro-batch, and the engine's log-probabilities of the sampled tokens."""
    async with serving(config, folder) as engine:
        turns = await asyncio.gather(*(engine.generate(ids, sampling, str(n)) for n, ids in enumerate(prompts)))
    rows = [np.concatenate([ids, turn.token_ids]) for ids, turn in zip(prompts, turns, strict=True)]
    mask_N = np.concatenate([np.arange(len(row)) >= len(ids) for row, ids in zip(rows, prompts, strict=True)])
    batch = MicroBatch(
        token_ids_N=np.concatenate(rows),
        offsets_R=np.cumsum([0, *map(len, rows)], dtype=np.int64),
        loss_mask_N=mask_N,
        logprobs_N=np.zeros(len(mask_N), np.float32),
        staleness_N=np.where(mask_N, 0, -1).astype(np.int32),
        temperature_R=np.full(len(rows), sampling.temperature, np.float32),
        trajectory_of_row_R=np.arange(len(rows), dtype=np.int32),
    )
    return batch, np.concatenate([turn.logprobs for turn in turns if turn.logprobs is not None]).astype(np.float64)


@torch.no_grad()
def by_row(model: PreTrainedModel, micro: MicroBatch) -> Float64s:
    """The log-probabilities of the loss tokens, by transformers' own forward pass of each row alone."""
    found = []
    for row, (start, stop) in enumerate(pairwise(micro.offsets_R)):
        ids_T = torch.from_numpy(micro.token_ids_N[start:stop]).long()
        logits_TV = model(ids_T[None]).logits[0, :-1].double() / float(micro.temperature_R[row])
        of_T = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
        found.append(of_T[torch.from_numpy(micro.loss_mask_N[start + 1 : stop])])
    return torch.cat(found).numpy()
