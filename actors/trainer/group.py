"""Calls all ranks of the trainer together; a failure of one rank is a failure of the group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray
from torch.distributed import DistError

from actors.calls import RESTARTING, answer, call, check_comes_back, in_a_line
from actors.weights.nixl_reads import RemoteMemory
from actors.weights.part import PublishedWeights, Source, TrainerLost, WeightBucket, check_parts
from service.backoff import retried
from service.config import Config
from service.errors import ProcessLost, RunFailed, Starved
from service.learn.learner import StepReport
from service.learn.model.policy import OutOfMemory
from service.learn.model.policy_model import Checkpointing
from service.run.liveness.host_memory import advice
from service.run.phases import say
from service.types import PolicyVersion, SupervisedRow

MEMORY = "trainer/gpu_reserved_bytes"
"""A metric of a step that differs from rank to rank; the largest value of all ranks is reported."""

PROGRESS_SECONDS = 0.2
"""Seconds between two questions to the ranks about the bytes of a checkpoint that are on disk."""


class TrainerGroup:
    """All ranks of the trainer. A method that calls the ranks raises `TrainerLost` if a rank fails."""

    def __init__(self, config: Config, ranks: Sequence[Any]) -> None:
        """Store the ranks, and the seconds in which they must start, and in which they must answer a later call."""
        self._start_deadline, self._deadline = config.run.start_deadline, config.run.stall_deadline
        # one call takes all steps of the warm start, and each step may take as long as an RL step
        self._warm_start_deadline = self._deadline * (config.model.warm_start.steps if config.model.warm_start else 0)
        self._ranks = list(ranks)
        self.named = {f"trainer-{number}": rank for number, rank in enumerate(ranks)}
        self._processes: list[str] = []
        self._checkpointing: Checkpointing | None = None
        """The gradient checkpointing of all ranks after one of them ran out of memory; None: as in the settings. It is
        equal on all ranks, because otherwise they would wait for each other."""
        self.nodes: list[str] = []
        """The id of each rank's node."""

    async def load(self, model_folder: Path, adapter: bool = True) -> None:
        """Form the process group and load the policy; `adapter`: whether to add the adapter of `model.lora`, if
        there is one. If the largest micro-batch needs more memory, the ranks restart with more gradient checkpointing.

        Raises:
            Starved: the ranks did not start in time.
            TrainerLost: a rank died meanwhile, or memory lacks at every level of gradient checkpointing.
        """
        try:
            self._processes = [life.process for life in await self._start("life")]
            places = await self._start("place")
            self.nodes = [node for node, _ in places]
            await self._start("load", places[0][1], str(model_folder), self.nodes, adapter, self._checkpointing)
        except (ray.exceptions.RayActorError, RuntimeError) as error:
            # A rank may notice the death of another rank before Ray does; gloo has no class of errors for it.
            why = in_a_line(error)
            if not isinstance(error, ray.exceptions.RayActorError | DistError) and "gloo" not in why.lower():
                raise
            raise TrainerLost(f"the trainer failed as it started ({why})") from error
        except OutOfMemory as error:
            if error.lighter is None:
                raise TrainerLost(f"the trainer failed as it started ({_with_advice(error)})") from error
            self._checkpointing = error.lighter
            say(f"{error}; the ranks start again with more gradient checkpointing")
            await self.restart(model_folder, adapter)

    async def restart(self, model_folder: Path, adapter: bool = True) -> None:
        """End every rank's process and form a new group; `adapter`: see `load`.

        Raises:
            RunFailed: the ranks did not restart in time.
            TrainerLost: a rank died meanwhile.
        """
        for rank in self._ranks:
            ray.kill(rank, no_restart=False)
        ended = list(self._processes)

        async def came_back() -> None:
            lives = await self._start("life")
            if any(life.process in ended for life in lives):
                raise ConnectionError("a rank's old process has not ended")

        errors = (ray.exceptions.RayActorError, ConnectionError)
        try:
            await retried(came_back, errors, RESTARTING, within=self._start_deadline, failed=check_comes_back)
        except errors as error:
            limit = f"within {self._start_deadline:.0f} s"
            raise RunFailed(f"the trainer ranks did not come back {limit}: {in_a_line(error)}") from error
        await self.load(model_folder, adapter)

    async def warm_start(self, demonstrations: Sequence[SupervisedRow]) -> float:
        """Take supervised steps on every rank; returns the last loss."""
        within = self._warm_start_deadline
        return float((await self._ask_all("warm_start", ray.put(list(demonstrations)), within=within))[0])

    async def supervised(self, rows: Sequence[SupervisedRow], lr: float | None) -> float:
        """Take a supervised step on every rank; returns the cross-entropy per token. If `lr` is None, only measure."""
        return float((await self._ask_all("supervised", ray.put(list(rows)), lr))[0])

    async def step(self, batches: Sequence[NDArray[np.uint8]]) -> StepReport:
        """Take one optimizer step; `batches` has the encoded part of the mini-batch for each rank, or for each group of
        ranks that share micro-batches."""
        ranks_of_part = len(self._ranks) // len(batches)
        put = await asyncio.gather(*(asyncio.to_thread(ray.put, batch) for batch in batches))  # gigabytes take a second
        of_rank = [batch for batch in put for _ in range(ranks_of_part)]
        reports = await asyncio.gather(*(self._ask(rank, "step", batch) for rank, batch in enumerate(of_rank)))
        report: StepReport = reports[0]
        if MEMORY not in report.metrics:
            return report
        return report._replace(metrics=report.metrics | {MEMORY: max(each.metrics[MEMORY] for each in reports)})

    async def weights(self, version: PolicyVersion) -> PublishedWeights:
        """Let every rank copy its part of the policy, or for transport `ipc` gather the whole policy."""
        published = await self._ask_all("weights", version.pack())
        if isinstance(published[0], Source):
            check_parts([source.part for source in published])
            return PublishedWeights(version, sources=(*published,))
        return PublishedWeights(version)

    async def remotes(self) -> list[tuple[RemoteMemory | None, str]]:
        """Let generators of other hosts read each rank's part of the weights. Returns for each rank its memory and an
        empty text, or None and the reason why NIXL cannot be used."""
        return await self._ask_all("share")

    async def bucket(self, version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, Any] | None:
        """Return the description of a rank's bytes from `start` to `stop`, and a Ray reference to the bytes; None if
        the rank has newer weights."""
        message, bucket = self._ranks[rank].bucket.remote(version.pack(), start, stop)
        with _raises_trainer_lost():
            found = await answer(bucket, who=f"trainer-{rank}", within=self._deadline)
            return None if found is None else (found, message)

    async def ipc_handles(self, number: int, version: PolicyVersion) -> tuple[bytes, int] | None:
        """Return an announcement with memory handles of a rank's weights, and the announcement's checksum.

        `number`: the number of the rank. The handles are for one update of the engine on the rank's GPU. None: the
        rank has newer weights.
        """
        found: tuple[bytes, int] | None = await self._ask(number, "ipc_handles", version.pack())
        return found

    async def save(self, folder: Path) -> None:
        """Begin a checkpoint: every rank copies its part and writes it in the background."""
        await self._ask_all("save", str(folder))

    async def finish_save(self) -> None:
        """Wait until every rank's part of the last checkpoint is on disk, as long as bytes are written."""
        last, since = list[int | None](), time.monotonic()
        while {*(found := await self._ask_all("save_progress"))} != {None}:
            if found != last:
                last, since = found, time.monotonic()
            elif time.monotonic() - since > self._deadline:
                raise TrainerLost(f"the trainer has written no byte of its checkpoint for {self._deadline:.0f} s")
            await asyncio.sleep(PROGRESS_SECONDS)

    async def restore(self, folder: Path) -> None:
        """Resume from a checkpoint."""
        await self._ask_all("restore", str(folder))

    async def export(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._ask_all("export", str(folder))

    async def _start(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every starting rank; an error that Baton raised on purpose keeps its type."""
        calls = (
            call(getattr(rank, method), *arguments, who=f"trainer-{number}", within=self._start_deadline)
            for number, rank in enumerate(self._ranks)
        )
        return list(await asyncio.gather(*calls))

    async def _ask(self, number: int, method: str, *arguments: Any, within: float | None = None) -> Any:
        with _raises_trainer_lost():
            rank, within = self._ranks[number], within or self._deadline
            try:
                return await call(getattr(rank, method), *arguments, who=f"trainer-{number}", within=within)
            except OutOfMemory as error:
                self._checkpointing = error.lighter or self._checkpointing
                raise

    async def _ask_all(self, method: str, *arguments: Any, within: float | None = None) -> list[Any]:
        ranks = range(len(self._ranks))
        return list(await asyncio.gather(*(self._ask(number, method, *arguments, within=within) for number in ranks)))


@contextmanager
def _raises_trainer_lost() -> Iterator[None]:
    """Raise `TrainerLost` in place of Ray's errors, missed deadlines, lack of memory, and a rank that is not set up."""
    try:
        yield
    except (ray.exceptions.RayError, ProcessLost, OutOfMemory) as error:
        is_remedied = isinstance(error, OutOfMemory) and error.lighter is not None
        raise TrainerLost(f"the trainer failed ({_with_advice(error)})", is_remedied) from error
    except Starved as error:
        raise TrainerLost(f"the trainer is silent ({error})") from error


def _with_advice(error: Exception) -> str:
    why = in_a_line(error)
    return why + advice(why, "trainer")
