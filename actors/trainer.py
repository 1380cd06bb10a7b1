"""The trainer: one Ray actor a rank around `service.learn.Learner`, and the group that drives them as one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from safetensors.torch import save

from service.config import Config
from service.handoff.wire import decode_mini_batch
from service.learn.learner import Learner, StepReport
from service.types import Bools, Int32s


class TrainerRank:
    """One rank: holds its shard of the policy and steps on its part of each mini-batch."""

    def __init__(self, config_json: str, rank: int) -> None:
        self._config = Config.model_validate_json(config_json)
        self._rank = rank
        self._world = self._config.trainer.ranks
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._learner: Learner | None = None

    def __repr__(self) -> str:
        return f"TrainerRank(rank={self._rank}/{self._world})"

    def meeting_point(self) -> tuple[str, int]:
        """An address of this rank's node with a free port, where the process group can meet."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((address, 0))
            return address, int(free.getsockname()[1])

    def load(self, meeting_point: tuple[str, int], model_folder: str) -> None:
        """Join the process group and load the policy from disk."""
        if self._world > 1:
            address, port = meeting_point
            dist.init_process_group(
                "cuda:nccl,cpu:gloo" if self._device.type == "cuda" else "gloo",
                init_method=f"tcp://{address}:{port}",
                rank=self._rank,
                world_size=self._world,
                timeout=timedelta(seconds=self._config.trainer.collective_deadline),
            )
        self._learner = Learner(self._config, Path(model_folder), self._device, self._rank, self._world)

    def warm_start(self, demonstrations: Sequence[tuple[Int32s, Bools]]) -> float:
        """Supervised steps on demonstrations; returns the last step's cross-entropy per token."""
        settings = self._config.model.warm_start
        if settings is None:
            raise ValueError("warm_start was called without model.warm_start in the configuration")
        rng = np.random.default_rng(self._config.run.seed)
        loss = float("nan")
        for step in range(settings.steps):
            chosen = rng.choice(len(demonstrations), size=settings.batch_size, replace=False)
            rise = min(1.0, (step + 1) / (0.1 * settings.steps))
            decay = 1.0 - step / settings.steps
            mine = [demonstrations[i] for i in chosen[self._rank :: self._world]]
            loss = self.learner.supervised_step(mine, lr=settings.lr * min(rise, decay))
        return loss

    def step(self, batch: bytes) -> StepReport:
        """One optimizer step on this rank's micro-batches."""
        return self.learner.step(decode_mini_batch(batch))

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def weights(self) -> tuple[NDArray[np.uint8], int]:
        """The policy as safetensors with its xxh3 checksum on rank 0, nothing on the others; every rank must call."""
        weights = self.learner.weights()
        data = b"" if weights is None else save(weights)
        # Ray hands a numpy array over without a copy, and copies bytes.
        return np.frombuffer(data, dtype=np.uint8), xxhash.xxh3_64_intdigest(data)

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder; every rank must call."""
        self.learner.export(Path(folder))

    @property
    def learner(self) -> Learner:
        """The loaded learner."""
        if self._learner is None:
            raise ValueError(f"trainer rank {self._rank} was used before load()")
        return self._learner


@dataclass(frozen=True)
class PublishedWeights:
    """Weights on their way to the engines: an object reference to safetensors bytes, and their checksum."""

    data: Any
    checksum: int


class TrainerGroup:
    """All ranks, called as one; a rank's death is everyone's."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self._ranks = list(ranks)

    async def load(self, model_folder: Path) -> None:
        """Form the process group and load the policy."""
        meeting_point = await self._ranks[0].meeting_point.remote()
        await asyncio.gather(*(rank.load.remote(meeting_point, str(model_folder)) for rank in self._ranks))

    async def warm_start(self, demonstrations: Sequence[tuple[Int32s, Bools]]) -> float:
        """Supervised steps on every rank; returns the last loss."""
        shared = ray.put(list(demonstrations))
        losses = await asyncio.gather(*(rank.warm_start.remote(shared) for rank in self._ranks))
        return float(losses[0])

    async def step(self, batches: Sequence[bytes]) -> StepReport:
        """One optimizer step; `batches` has a part for each rank."""
        calls = [rank.step.remote(batch) for rank, batch in zip(self._ranks, batches, strict=True)]
        reports: list[StepReport] = await asyncio.gather(*calls)
        return reports[0]

    async def weights(self) -> PublishedWeights:
        """Gather the full policy on rank 0."""
        pairs = [rank.weights.remote() for rank in self._ranks]
        checksums = await asyncio.gather(*(checksum for _, checksum in pairs))
        return PublishedWeights(pairs[0][0], int(checksums[0]))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await asyncio.gather(*(rank.export.remote(str(folder)) for rank in self._ranks))
