"""The buffer's Ray shell: the five verbs with long polls, and an acknowledgement only after the disk has it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeVar

from actors.calls import resolve_actor
from actors.observe.telemetry import BufferTelemetry
from service.clock import SystemClock
from service.config import Config
from service.errors import RunFailed
from service.files import lock_folder
from service.handoff.batches.batch import CompleteGroup, batch_of_rank
from service.handoff.batches.form import Forming
from service.handoff.buffer import Buffer
from service.handoff.journal.journal import Journal
from service.handoff.steps.validate import Routing
from service.handoff.steps.wire import encode_mini_batch
from service.handoff.verbs import Assignment, Claim, Receipt, Wait
from service.observe.trajectories import LostTrajectories, trajectory_records
from service.rollout.prompts.dataset import load_tasks
from service.types import MiniBatch, PolicyVersion, Refusal

Answer = TypeVar("Answer")

TICK_SECONDS = 0.5
SWITCH_SECONDS = 0.0005
"""How long the thread that forms a mini-batch may keep the interpreter from the acknowledgements; Python's own is ten
times as long."""
LOCK_SECONDS = 15.0
"""Seconds that an older buffer may take to go; a run's watchdog ends it within two."""


class Leased(NamedTuple):
    """A leased mini-batch on its way to the trainer."""

    lease: int
    metrics: dict[str, float]
    parts: tuple[bytes, ...]
    """The encoded mini-batch of each rank."""
    trajectories: list[dict[str, Any]]
    """Some of its trajectories, for people to look at."""
    lost: list[dict[str, Any]]
    """The same of what ended since the lease before without being trained."""


def lock_journal(folder: Path, seconds: float) -> TextIO:
    """Lock a journal's folder: two buffers must not write one journal.

    Raises:
        RunFailed: another process held the lock for so many seconds.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return lock_folder(folder, seconds)
    except TimeoutError:
        raise RunFailed(f"{folder}: another process still writes this journal; end it first") from None


class BufferActor:
    """One per run; asyncio, because Ray may deliver calls late and out of order: nothing here relies on order."""

    def __init__(
        self,
        config_json: str,
        vocab_size: int,
        tasks_file: str,
        journal_folder: str,
        hub: Any,
        routing: Routing | None = None,
    ) -> None:
        self._config = Config.model_validate_json(config_json)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._clock = SystemClock()
        self._opened: Buffer | None = None
        self._failure: Exception | None = None
        try:
            self._journal_lock = lock_journal(Path(journal_folder), LOCK_SECONDS)
            self._journal = Journal(Path(journal_folder), self._clock)
            prompt_uids = [task.uid for task in load_tasks(Path(tasks_file))]
            seed = self._config.run.seed
            self._opened = Buffer(self._config, vocab_size, prompt_uids, self._journal, self._clock, seed, routing)
        except Exception as error:  # noqa: BLE001 - raised by `_buffer`, for whoever asks
            # Ray would start an actor whose constructor raises again and again; here the first who asks is told.
            self._failure = error
            return
        self._lost = LostTrajectories(self._config)
        self._buffer.watch_ends(self._lost.ended)
        self._telemetry = BufferTelemetry(self._config, resolve_actor(hub), self._buffer)
        self._telemetry.start()
        self._changed = asyncio.Condition()
        self._queued = asyncio.Event()
        self._wakers: list[asyncio.Task[None]] = []
        self._flushed = asyncio.Condition()
        self._background = [asyncio.ensure_future(self._flush()), asyncio.ensure_future(self._tick())]
        for task in self._background:
            task.add_done_callback(self._wake_all)

    def __repr__(self) -> str:
        return "Buffer(cannot start)" if self._opened is None else f"Buffer(policy {self._opened.version})"

    @property
    def _buffer(self) -> Buffer:
        """The buffer, or what kept it from starting, raised."""
        if self._opened is None:
            raise self._failure or RunFailed("the buffer has not started")
        return self._opened

    async def ready(self) -> None:
        """Raises what kept the buffer from starting, such as a damaged journal."""
        _ = self._buffer

    async def join(self, role: Literal["generator", "trainer"], name: str, step: int | None = None) -> int:
        """Start a new incarnation of a generator or trainer; the one before it can no longer write."""
        incarnation = self._buffer.join(role, name, step)
        await self._settled()
        return incarnation

    async def leave(self, generator: str, incarnation: int, reason: str) -> None:
        """A generator is gone: its open trajectories start anew elsewhere."""
        self._buffer.leave(generator, incarnation, reason)
        await self._settled()

    async def claim(self, claim: Claim, wait_seconds: float) -> Assignment | Wait | Refusal:
        """Take one group of work; waits up to `wait_seconds` for a slot."""
        return await self._poll(lambda: self._buffer.claim(claim), wait_seconds)

    async def submit(self, data: bytes) -> Receipt | Refusal:
        """Accept a step group; the receipt is given when the journal is on disk."""
        answer = self._buffer.submit(data)
        await self._settled()
        return answer

    async def lease(self, trainer_incarnation: int, wait_seconds: float) -> Leased | Wait | Refusal:
        """Take a mini-batch; waits up to `wait_seconds` for enough complete groups.

        Forming and encoding it take long and go on in a thread, while steps are accepted.
        """
        answer = await self._poll(lambda: self._buffer.begin_lease(trainer_incarnation), wait_seconds)
        if isinstance(answer, Forming):
            made = await asyncio.to_thread(answer.run)
            answer = self._buffer.finish_lease(answer, made)
            await self._settled()
        if not isinstance(answer, MiniBatch):
            return answer
        groups = [self._buffer.complete_group(group_id) for group_id in answer.groups]
        return await asyncio.to_thread(self._on_its_way, answer, groups, self._buffer.version)

    def _on_its_way(self, batch: MiniBatch, groups: Sequence[CompleteGroup], version: PolicyVersion) -> Leased:
        self._telemetry.batches.leased(batch)
        parts = tuple(encode_mini_batch(batch_of_rank(batch, rank)) for rank in range(len(batch.ranks)))
        records = trajectory_records(batch, groups, version, self._config)
        return Leased(batch.lease, batch.metrics, parts, records, self._lost.take())

    async def commit(self, trainer_incarnation: int, lease: int, version: PolicyVersion) -> Refusal | None:
        """The optimizer step of a lease was applied and made `version`."""
        answer = self._buffer.commit(trainer_incarnation, lease, version)
        if answer is None:
            self._telemetry.batches.committed(lease)
        await self._settled()
        return answer

    async def release(self, trainer_incarnation: int, lease: int, reason: str) -> Refusal | None:
        """Give a lease back unused."""
        answer = self._buffer.release(trainer_incarnation, lease, reason)
        self._telemetry.batches.released(lease)
        await self._settled()
        return answer

    async def covered(self, step: int, oldest_kept: int) -> None:
        """A durable checkpoint covers the optimizer steps up to `step`; none older than `oldest_kept` is kept."""
        self._buffer.covered(step, oldest_kept)
        await self._settled()

    async def drain(self, reason: str) -> None:
        """Issue no more prompts."""
        self._buffer.drain(reason)
        await self._settled()

    async def resume(self) -> None:
        """A run that had come to its end goes on."""
        self._buffer.resume()
        await self._settled()

    async def end(self) -> list[dict[str, Any]]:
        """The run is over: what no optimizer step used expires; returns some of it, for people to look at."""
        self._buffer.end()
        await self._settled()
        return self._lost.take()

    async def status(self) -> dict[str, Any]:
        """The buffer's part of the run's status."""
        return self._buffer.status().as_dict()

    async def _poll(self, ask: Callable[[], Answer], wait_seconds: float) -> Answer:
        """Ask again whenever the buffer changes, until the answer is not a Wait or the time is over."""
        deadline = time.monotonic() + wait_seconds
        answer = ask()
        while isinstance(answer, Wait) and (left := deadline - time.monotonic()) > 0:
            try:
                async with self._changed:
                    await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
            answer = ask()
        if not isinstance(answer, Wait):
            await self._settled()
        return answer

    async def _settled(self) -> None:
        """Wake the waiting polls, and return when everything journalled so far is on disk."""
        async with self._changed:
            self._changed.notify_all()
        position = self._journal.position
        self._queued.set()
        async with self._flushed:
            await self._flushed.wait_for(lambda: self._journal.synced >= position or self._broken())
        for task in self._background:
            if task.done():
                task.result()

    def _broken(self) -> bool:
        return any(task.done() for task in self._background)

    def _wake_all(self, _: asyncio.Task[None]) -> None:
        """A background task failed: whoever waits for the journal learns why."""
        self._wakers.append(asyncio.ensure_future(self._notify()))

    async def _notify(self) -> None:
        async with self._flushed:
            self._flushed.notify_all()

    async def _flush(self) -> None:
        """Group commit: one sync for everything queued since the last one."""
        while True:
            await self._queued.wait()
            self._queued.clear()
            await asyncio.to_thread(self._journal.sync)
            async with self._flushed:
                self._flushed.notify_all()
            await asyncio.sleep(self._config.buffer.sync_interval)

    async def _tick(self) -> None:
        """Let deadlines pass, and what the disk had no room for be tried again."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._buffer.tick()
            if self._journal.stalled is not None:
                self._queued.set()
            async with self._changed:
                self._changed.notify_all()
