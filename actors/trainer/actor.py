"""The trainer: one Ray actor a rank around `service.learn.Learner`, and the group that drives them as one."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from safetensors.torch import save

from actors.calls import call, in_a_line, resolve_actor
from actors.observe.reporting import Reporter
from actors.weights.broadcast import MeetingPoint, Sender, announcement
from actors.weights.gpu_sharing import shared
from service.config import Config
from service.errors import BatonError, RunFailed, Starved
from service.handoff.steps.wire import decode_mini_batch
from service.learn.learner import Learner, StepReport
from service.types import Bools, Int32s, PolicyVersion

NOTHING = xxhash.xxh3_64_intdigest(b"")
"""The checksum of no bytes."""
RETRY_SECONDS = 0.5
"""Pause before ranks that are not up yet are called again."""


class TrainerRank:
    """One rank: holds its shard of the policy and steps on its part of each mini-batch."""

    def __init__(self, config_json: str, rank: int, hub: Any = None) -> None:
        self._config = Config.model_validate_json(config_json)
        self._rank = rank
        self._world = self._config.trainer.ranks
        self._device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self._learner: Learner | None = None
        self._to_send: dict[str, torch.Tensor] = {}
        self._version_to_send: int | None = None
        self._senders: dict[str, Sender] = {}
        self._steps = 0
        if hub is not None:
            Reporter("trainer", f"trainer-{rank}", self._config, resolve_actor(hub)).start_thread()

    def __repr__(self) -> str:
        state = "not loaded" if self._learner is None else f"{self._steps} steps"
        return f"TrainerRank({self._rank} of {self._world}, {state})"

    def process(self) -> int:
        """The id of this rank's process."""
        return os.getpid()

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
        report = self.learner.step(decode_mini_batch(batch))
        self._steps += 1
        return report

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def weights(self, version: int) -> tuple[NDArray[np.uint8], int]:
        """The policy as safetensors, or its announcement where it is sent by NCCL, with the xxh3 checksum of that.

        There is nothing on ranks other than 0, nor where the ranks share it with engines; every rank must call.
        """
        if self._config.weights.transport == "ipc":
            self._keep_to_share(version)
            return _handed_over(b"")
        weights = self.learner.weights()
        if weights is None:
            data = b""
        elif self._config.weights.transport == "nccl":
            self._to_send, self._version_to_send, data = weights, version, announcement(weights)
        else:
            data = save(weights)
        return _handed_over(data)

    def _keep_to_share(self, version: int) -> None:
        """Gather the policy on every rank's GPU, in place of the one before."""
        self._to_send, self._version_to_send = {}, None
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        self._to_send, self._version_to_send = self.learner.weights_on_device(), version

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def share(self, version: int) -> tuple[NDArray[np.uint8], int]:
        """Where the weights of this version lie on this rank's GPU, for one update of the engine beside it.

        Nothing, where newer ones have taken their place.
        """
        data = shared(self._to_send, self._device) if version == self._version_to_send else b""
        return _handed_over(data)

    def join_engine(self, engine: str, meeting_point: MeetingPoint) -> None:
        """Meet an engine's workers, which do the same meanwhile, in a group of their own."""
        self._senders[engine] = Sender(meeting_point, self._config.generator.tensor_parallel_size)

    def begin_send(self, engine: str, version: int) -> bool:
        """Begin to send the weights of this version to an engine; False where newer ones have taken their place."""
        if version != self._version_to_send:
            return False
        self._senders[engine].begin(self._to_send, self._device)
        return True

    def save(self, folder: str) -> None:
        """Copy this rank's part of a checkpoint and begin to write it."""
        self.learner.save(Path(folder), background=True)

    def finish_save(self) -> None:
        """Wait until this rank's part of the last checkpoint is on disk."""
        self.learner.finish_save()

    def restore(self, folder: str) -> None:
        """Go on from a checkpoint, which another number of ranks may have written."""
        self.learner.load(Path(folder))

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder; every rank must call."""
        self.learner.export(Path(folder))

    @property
    def learner(self) -> Learner:
        """The loaded learner."""
        if self._learner is None:
            raise ValueError(f"trainer rank {self._rank} was used before load()")
        return self._learner


def _handed_over(data: bytes) -> tuple[NDArray[np.uint8], int]:
    """With their checksum; Ray hands a numpy array over without a copy, and copies bytes."""
    return np.frombuffer(data, dtype=np.uint8), xxhash.xxh3_64_intdigest(data)


class TrainerLost(BatonError):
    """A rank died or raised; the group it was in can do nothing more."""


@dataclass(frozen=True)
class PublishedWeights:
    """Weights on their way to the engines: an object reference to safetensors bytes, and their checksum."""

    data: Any
    checksum: int


class TrainerGroup:
    """All ranks, called as one; what befalls a rank befalls the group, as `TrainerLost`."""

    def __init__(self, config: Config, ranks: Sequence[Any]) -> None:
        self._start_deadline = config.trainer.start_deadline
        self._deadline = config.run.stall_deadline
        self._warm_start_steps = 0 if config.model.warm_start is None else config.model.warm_start.steps
        self._ranks = list(ranks)
        self._processes: list[int] = []

    async def load(self, model_folder: Path) -> None:
        """Form the process group and load the policy.

        Raises:
            Starved: the ranks did not start in time.
        """
        self._processes = await self._ask("process")
        meeting_point = await call(self._ranks[0].meeting_point, who="trainer-0")
        await self._ask("load", meeting_point, str(model_folder))

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank while they start."""
        calls = (
            call(getattr(rank, method), *arguments, who=f"trainer-{number}", within=self._start_deadline)
            for number, rank in enumerate(self._ranks)
        )
        return list(await asyncio.gather(*calls))

    async def restart(self, model_folder: Path) -> None:
        """End every rank's process and form a new group.

        Raises:
            RunFailed: the ranks did not come back in time.
        """
        for rank in self._ranks:
            ray.kill(rank, no_restart=False)
        ended = list(self._processes)
        deadline = time.monotonic() + self._start_deadline
        while time.monotonic() < deadline:
            try:
                processes = await self._ask("process")
            except ray.exceptions.RayActorError:
                processes = ended
            if all(new != old for new, old in zip(processes, ended, strict=True)):
                return await self.load(model_folder)
            await asyncio.sleep(RETRY_SECONDS)
        raise RunFailed(f"the trainer ranks did not come back within {self._start_deadline:.0f} s")

    def end(self) -> None:
        """End every rank's process, for good."""
        for rank in self._ranks:
            ray.kill(rank)

    async def warm_start(self, demonstrations: Sequence[tuple[Int32s, Bools]]) -> float:
        """Supervised steps on every rank; returns the last loss."""
        shared = ray.put(list(demonstrations))
        # One call for all steps, each of which may take as long as any other step.
        within = self._deadline * self._warm_start_steps
        losses = await self._all("warm_start", [(shared,)] * len(self._ranks), within)
        return float(losses[0])

    async def step(self, batches: Sequence[bytes]) -> StepReport:
        """One optimizer step; `batches` has a part for each rank."""
        reports: list[StepReport] = await self._all("step", [(batch,) for batch in batches])
        return reports[0]

    async def weights(self, version: PolicyVersion) -> PublishedWeights:
        """Gather the full policy on rank 0, or on every rank's GPU where they share it with engines."""
        pairs = [rank.weights.remote(version.pack()) for rank in self._ranks]
        try:
            async with asyncio.timeout(self._deadline):
                checksums = await asyncio.gather(*(checksum for _, checksum in pairs))
        except ray.exceptions.RayError as error:
            raise _lost(error) from error
        except TimeoutError:
            raise TrainerLost(f"no weights of the trainer for {self._deadline:.0f} s") from None
        return PublishedWeights(pairs[0][0], int(checksums[0]))

    async def join_engine(self, engine: str, generator: Any) -> None:
        """Let rank 0 and an engine meet.

        Raises:
            Starved: they did not meet in time.
        """
        point = await call(self._ranks[0].meeting_point, who="trainer-0")
        within = self._start_deadline
        await asyncio.gather(
            call(self._ranks[0].join_engine, engine, point, who="trainer-0", within=within),
            call(generator.join_trainer, point, who=engine, within=within),
        )

    async def begin_send(self, engine: str, version: PolicyVersion) -> bool:
        """Let rank 0 send these weights to an engine; as soon as it begins, or False where it has newer ones."""
        begun: bool = await call(self._ranks[0].begin_send, engine, version.pack(), who="trainer-0")
        return begun

    async def share(self, number: int, version: PolicyVersion) -> PublishedWeights | None:
        """Where weights lie on a rank's GPU, for one update of the engine beside it; None where newer ones do.

        Raises:
            TrainerLost: the rank died, or did not answer in time.
        """
        where, told = self._ranks[number].share.remote(version.pack())
        try:
            async with asyncio.timeout(self._deadline):
                checksum = int(await told)
        except ray.exceptions.RayError as error:
            raise _lost(error) from error
        except TimeoutError:
            raise TrainerLost(f"trainer-{number} did not share its weights for {self._deadline:.0f} s") from None
        return None if checksum == NOTHING else PublishedWeights(where, checksum)

    async def save(self, folder: Path) -> None:
        """Begin a checkpoint: every rank copies its part and writes it in the background."""
        await self._all("save", [(str(folder),)] * len(self._ranks))

    async def finish_save(self) -> None:
        """Wait until every rank's part of the last checkpoint is on disk."""
        await self._all("finish_save", [()] * len(self._ranks))

    async def restore(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        await self._all("restore", [(str(folder),)] * len(self._ranks))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._all("export", [(str(folder),)] * len(self._ranks))

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]], within: float | None = None) -> list[Any]:
        """Call a method of every rank; an error that Baton raised on purpose is raised as itself."""
        calls = (
            call(getattr(rank, method), *given, who=f"trainer-{number}", within=within or self._deadline)
            for number, (rank, given) in enumerate(zip(self._ranks, arguments, strict=True))
        )
        try:
            return list(await asyncio.gather(*calls))
        except ray.exceptions.RayError as error:
            raise _lost(error) from error
        except Starved as error:
            raise TrainerLost(f"the trainer is silent ({error})") from error


def _lost(error: ray.exceptions.RayError) -> TrainerLost:
    return TrainerLost(f"the trainer failed ({in_a_line(error)})")
