"""Mini-batches by hand: trajectories as rows of tokens, cut and packed at will."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from service.config.learn import AlgorithmConfig, TrainerConfig
from service.config.tree import Config, ModelConfig
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.types import MicroBatch, MiniBatch

CPU = torch.device("cpu")
VOCABULARY = 37
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def small_model(folder: Path, seed: int = 0) -> Path:
    """A Qwen3 folder with weights large enough that probabilities differ visibly."""
    make_model(folder, SHAPE, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=seed)
    return folder


def settings(
    algorithm: dict[str, Any] | None = None, trainer: dict[str, Any] | None = None, **model: Any
) -> LearnSettings:
    """Settings for small models in float32, unless told otherwise."""
    # float64 is no setting of a run; it tells rounding from error
    dtype = {"dtype": model.pop("dtype", "float32")}
    config = Config(
        model=ModelConfig(**model).model_copy(update=dtype),
        algorithm=AlgorithmConfig(**algorithm or {}),
        trainer=TrainerConfig(**{"lr": 1e-3} | (trainer or {})),
    )
    return LearnSettings.of(config)


@dataclass(frozen=True)
class MadeRow:
    """One row of a trajectory."""

    trajectory: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    staleness: np.ndarray
    temperature: float = 1.0


def made_rows(trajectories: int, seed: int, lengths: tuple[int, int] = (6, 30)) -> list[MadeRow]:
    """One random row a trajectory."""
    rng = np.random.default_rng(seed)
    return [made_row(trajectory, int(rng.integers(*lengths)), rng) for trajectory in range(trajectories)]


def made_row(trajectory: int, length: int, rng: np.random.Generator) -> MadeRow:
    """A random row: about half of its tokens carry loss, never the first."""
    mask = rng.random(length) < 0.5
    mask[0], mask[-1] = False, True
    return MadeRow(
        trajectory=trajectory,
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, rng.normal(-3.6, 0.4, length), 0).astype(np.float32),
        staleness=np.where(mask, rng.integers(0, 4, length), -1).astype(np.int32),
        temperature=float(rng.choice([0.7, 1.0])),
    )


def split_row(row: MadeRow, cuts: Sequence[int]) -> list[MadeRow]:
    """The same trained tokens as rows of their own: each part keeps the whole prefix, and trains what it added."""
    edges = [0, *cuts, len(row.token_ids)]
    parts = []
    for start, stop in pairwise(edges):
        own = row.loss_mask[:stop] & (np.arange(stop) >= start)
        parts.append(
            MadeRow(
                row.trajectory,
                row.token_ids[:stop],
                own,
                np.where(own, row.logprobs[:stop], 0).astype(np.float32),
                np.where(own, row.staleness[:stop], -1).astype(np.int32),
                row.temperature,
            )
        )
    return parts


def micro_batch(rows: Sequence[MadeRow]) -> MicroBatch:
    """Rows packed in this order."""
    return MicroBatch(
        token_ids_N=np.concatenate([np.zeros(0, np.int32), *(row.token_ids for row in rows)]),
        offsets_R=np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int64),
        loss_mask_N=np.concatenate([np.zeros(0, bool), *(row.loss_mask for row in rows)]),
        logprobs_N=np.concatenate([np.zeros(0, np.float32), *(row.logprobs for row in rows)]),
        staleness_N=np.concatenate([np.zeros(0, np.int32), *(row.staleness for row in rows)]),
        temperature_R=np.array([row.temperature for row in rows], np.float32),
        trajectory_of_row_R=np.array([row.trajectory for row in rows], np.int32),
    )


def with_supports(micro: MicroBatch) -> MicroBatch:
    """The micro-batch with random supports: none, the token alone, the whole vocabulary or some; those of a token
    depend on its id and its place in the row, so that every cut of a row has the same."""
    sizes = np.zeros(len(micro.token_ids_N), np.uint16)
    ids = [np.zeros(0, np.uint16)]
    for start, stop in pairwise(micro.offsets_R.tolist()):
        for n in (start + np.flatnonzero(micro.loss_mask_N[start:stop])).tolist():
            rng = np.random.default_rng([n - start, int(micro.token_ids_N[n])])
            others = np.delete(np.arange(VOCABULARY), micro.token_ids_N[n])
            size = int(rng.choice([0, 1, VOCABULARY, rng.integers(2, VOCABULARY)]))
            sizes[n] = size
            ids.append(np.sort(rng.permutation(others)[: max(size, 1) - 1]).astype(np.uint16))
    return replace(micro, support_size_N=sizes, support_U=np.concatenate(ids))


def mini_batch(ranks: Sequence[Sequence[Sequence[MadeRow]]], trajectories: int, prompts: int = 2) -> MiniBatch:
    """Rows by rank and micro-batch; trajectory g belongs to prompt `g * prompts // trajectories`."""
    rows = [row for micros in ranks for micro in micros for row in micro if row.trajectory >= 0]
    owner = np.array([row.trajectory for row in rows], np.int64)
    tokens = np.array([row.loss_mask.sum() for row in rows], np.int64)
    return MiniBatch(
        lease=0,
        groups=tuple(range(prompts)),
        advantage_G=np.random.default_rng(7).normal(size=trajectories).astype(np.float32),
        return_G=np.zeros(trajectories),
        loss_tokens_G=np.bincount(owner, weights=tokens, minlength=trajectories).astype(np.int64),
        rows_G=np.bincount(owner, minlength=trajectories).astype(np.int32),
        prompt_of_trajectory_G=(np.arange(trajectories) * prompts // trajectories).astype(np.int32),
        ranks=tuple(tuple(micro_batch(micro) for micro in micros) for micros in ranks),
        metrics={},
    )


def row_by_row(
    folder: Path, rows: Sequence[MadeRow], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] log-probabilities of loss tokens, and entropies, by transformers' own forward pass of each row alone."""
    from transformers import AutoModelForCausalLM  # here, because importing it takes seconds

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    logprobs, entropies = [], []
    for row in rows:
        if len(row.token_ids) == 0:
            continue
        ids = torch.from_numpy(row.token_ids).long()
        table = (model(ids[None]).logits[0, :-1] / row.temperature).log_softmax(-1)
        mask = torch.from_numpy(row.loss_mask)[1:]
        logprobs.append(table.gather(1, ids[1:, None])[:, 0][mask])
        entropies.append(-(table.exp() * table).sum(-1)[mask])
    return torch.cat(logprobs).detach(), torch.cat(entropies).detach()
