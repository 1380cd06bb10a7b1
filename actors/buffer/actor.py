"""The buffer's Ray actor: serves the five verbs, and answers a call only after the call's events are on disk."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from actors.calls import resolve_actor
from actors.deaths import Supervised
from actors.heap import freeze_heap
from actors.observe.actor_logs import keep_log
from actors.observe.telemetry import BufferTelemetry
from service.clock import SystemClock
from service.config import Config
from service.config.core_settings import buffer_settings
from service.config.rollout import ScorerConfig
from service.errors import RunFailed
from service.files import lock_folder
from service.handoff.batches.batch import batch_of_rank
from service.handoff.buffer import Buffer
from service.handoff.buffer_settings import SYNC_SECONDS
from service.handoff.claims import WaitingClaims
from service.handoff.journal.journal import Journal
from service.handoff.leases import BatchJob
from service.handoff.ledger.events import GroupState
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.scoring import Scoring
from service.handoff.steps.values import Routing
from service.handoff.steps.wire import encode_mini_batch
from service.handoff.verbs import Claim, ClaimAnswer, Receipt, Wait
from service.rollout.prompts.dataset import load_tasks, rows_digest
from service.run.preparing.teachers import teachers_of
from service.run.records.trajectories import LostTrajectories, RecordSettings, trajectory_records
from service.types import MiniBatch, PolicyVersion, Refusal, TrajectoryId

TICK_SECONDS = 0.5
SWITCH_SECONDS = 0.0005
"""Python's thread switch interval in seconds, a tenth of the default. A thread that forms a mini-batch may delay other
calls by this much."""
LOCK_SECONDS = 15.0
"""Seconds to wait for the end of an earlier buffer process, which the watchdog of its run ends within two seconds."""


class LeasedBatch(NamedTuple):
    """A leased mini-batch, encoded for the trainer's ranks."""

    lease: int
    metrics: dict[str, float]
    parts: tuple[NDArray[np.uint8], ...]
    """The encoded part of each rank, or of each group of ranks that share micro-batches. Arrays, because Ray copies
    bytes several times and arrays once."""
    trajectories: list[dict[str, Any]]
    """A sample of the mini-batch's trajectories, for `trajectories.jsonl`."""
    lost: list[dict[str, Any]]
    """A sample of the trajectories that ended untrained since the previous lease, for `trajectories.jsonl`."""


def lock_journal(folder: Path, seconds: float) -> TextIO:
    """Lock a journal's folder, so that no second buffer writes to it.

    Raises:
        RunFailed: another process still held the lock after `seconds`.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return lock_folder(folder, seconds)
    except TimeoutError:
        raise RunFailed(f"{folder}: another process still writes this journal; end it first") from None


class AsksScorers(Protocol):
    """Sends the groups that wait for scorers to the scorers."""

    def look(self) -> None:
        """Look for waiting groups."""

    async def run(self) -> None:
        """Send groups until cancelled."""


MakeAsking = Callable[[Mapping[str, ScorerConfig], Scoring, Callable[[], Awaitable[None]]], AsksScorers]
"""A function of the scorers' settings, the groups that wait for scorers, and a function that returns when the journal
is on disk."""


class BufferActor(Supervised):
    """The buffer of a run, as an asyncio actor; Ray may deliver its calls late and in any order."""

    _sync_seconds = SYNC_SECONDS

    def __init__(
        self,
        config_json: str,
        vocab_size: int,
        tasks_file: str,
        journal_folder: str,
        hub: Any,
        routing: Routing | None = None,
        asking: MakeAsking | None = None,
    ) -> None:
        """Store the settings. `asking`: makes the object that sends groups to scorers; None: there are no scorers."""
        keep_log("buffer")
        self._config = Config.model_validate_json(config_json)
        sys.setswitchinterval(SWITCH_SECONDS)
        self._clock = SystemClock()
        self._opened: Buffer | None = None
        self._failure: Exception | None = None
        try:
            self._journal_lock = lock_journal(Path(journal_folder), LOCK_SECONDS)
            self._journal = Journal(Path(journal_folder), self._clock)
            tasks = load_tasks(Path(tasks_file))
            columns, temperatures = [task.extra_info for task in tasks], [task.temperature for task in tasks]
            self._opened = Buffer(
                buffer_settings(self._config, vocab_size, routing),
                [task.uid for task in tasks],
                self._journal,
                self._clock,
                rows_digest(tasks),
                teachers_of(self._config.scorers, self._config.algorithm.teacher, columns, temperatures),
            )
        except Exception as error:  # noqa: BLE001 - raised by `_buffer` at the first call
            # Ray would restart an actor whose constructor raises again and again.
            self._failure = error
            return
        self._lost = LostTrajectories(RecordSettings.of(self._config))
        self._buffer.watch_ends(self._lost.ended, self._lost.failed)
        self._telemetry = BufferTelemetry(self._config, resolve_actor(hub), self._buffer)
        self._telemetry.start()
        self._asking = asking and asking(self._config.scorers, self._buffer.scoring, self._settled)
        self._claims = WaitingClaims(self._opened.claim_several)
        self._served = 0
        """The buffer's revision when waiting calls were last served."""
        self._changed = asyncio.Condition()
        """Notified when the buffer changes; calls of `lease` wait for it."""
        self._queued = asyncio.Event()
        self._flushed = asyncio.Condition()
        self._background = asyncio.ensure_future(self._work())
        freeze_heap()

    @property
    def _buffer(self) -> Buffer:
        """The buffer; raises the error that kept it from starting."""
        if self._opened is None:
            raise self._failure or RunFailed("the buffer has not started")
        return self._opened

    async def ready(self) -> None:
        """Check that the buffer has started; raises the error that prevented the start, such as a damaged journal."""
        _ = self._buffer

    async def join(
        self, role: Literal["generator", "trainer"], name: str, step: int | None = None, resumes: bool = False
    ) -> int:
        """Start a new incarnation of a generator or of the trainer; returns the incarnation's number.

        Calls of the previous incarnation are refused from now on. `step`: the step from which a trainer continues;
        None: the newest one. `resumes`: whether other generators continue the trajectories that this one leaves
        unfinished.
        """
        incarnation = self._buffer.join(role, name, step, resumes)
        await self._settled()
        return incarnation

    async def continues(self, of: TrajectoryId) -> bool:
        """Return whether an attempt of a trajectory is unfinished, and not replaced by a newer one."""
        return self._buffer.ledger.continues(of)

    async def renew(
        self, generator: str, incarnation: int, trajectories: Sequence[TrajectoryId], call: bool = False
    ) -> None:
        """Extend the deadlines of a generator's trajectories that are still in progress, although no new step has
        arrived. `call`: the trajectories moved to it, and now call the policy."""
        self._buffer.renew(generator, incarnation, trajectories, call)

    async def leave(self, generator: str, incarnation: int | None, reason: str) -> None:
        """Record that a generator has ended: others continue its unfinished trajectories, or start them again.

        `incarnation`: the incarnation that ended; None: the current one.
        """
        self._buffer.leave(generator, incarnation, reason)
        await self._settled()

    async def claim(self, claim: Claim, wait_seconds: float, most: int = 1) -> ClaimAnswer:
        """Issue up to `most` groups to a generator, as soon as there is a slot for the first one. If there is none
        within `wait_seconds`, returns the reason as a `Wait`."""
        _ = self._buffer  # raises the error that kept the buffer from starting
        answered: asyncio.Future[ClaimAnswer] = asyncio.get_running_loop().create_future()
        deadline = time.monotonic() + wait_seconds if wait_seconds else None
        self._claims.answer(claim, most, deadline, answered.set_result)
        answer = await answered
        if not isinstance(answer, Wait):
            await self._settled()
        return answer

    async def submit(self, data: bytes) -> Receipt | Refusal:
        """Accept a message with steps and trajectory ends; returns when the message is on disk in the journal."""
        answer = self._buffer.submit(data)
        await self._settled()
        return answer

    async def lease(self, trainer_incarnation: int, wait_seconds: float) -> LeasedBatch | Wait | Refusal:
        """Lease a mini-batch as soon as there are enough complete groups. If there are still too few after
        `wait_seconds`, returns the reason as a `Wait`.

        The mini-batch is formed and encoded in a thread, while the actor accepts steps.
        """
        answer = await self._begin_lease(trainer_incarnation, wait_seconds)
        began = time.monotonic()
        if isinstance(answer, BatchJob):
            made = await asyncio.to_thread(answer.run)
            answer = self._buffer.finish_lease(answer, made)
            await self._settled()
        if not isinstance(answer, MiniBatch):
            return answer
        groups = [self._buffer.complete_group(group_id) for group_id in answer.groups]
        leased = await asyncio.to_thread(self._encode, answer, groups, self._buffer.version)
        self._telemetry.leased(leased.lease, answer.groups, began)
        return leased

    def _encode(self, batch: MiniBatch, groups: Sequence[CompleteGroup], version: PolicyVersion) -> LeasedBatch:
        self._telemetry.batches.leased(batch)
        encoded = (encode_mini_batch(batch_of_rank(batch, rank)) for rank in range(len(batch.ranks)))
        parts = tuple(np.frombuffer(part, np.uint8) for part in encoded)
        records = trajectory_records(batch, groups, version, RecordSettings.of(self._config))
        return LeasedBatch(batch.lease, batch.metrics, parts, records, self._lost.take())

    async def commit(self, trainer_incarnation: int, lease: int, version: PolicyVersion) -> Refusal | None:
        """Record that the optimizer step on a leased mini-batch was applied; its weights are `version`."""
        began = time.monotonic()
        answer = self._buffer.commit(trainer_incarnation, lease, version)
        await self._settled()
        if answer is None:
            self._telemetry.batches.committed(lease)
            self._telemetry.committed(lease, version.step, began)
        return answer

    async def release(self, trainer_incarnation: int, lease: int, reason: str) -> Refusal | None:
        """Release a lease whose mini-batch was not trained."""
        answer = self._buffer.release(trainer_incarnation, lease, reason)
        self._telemetry.batches.released(lease)
        await self._settled()
        return answer

    async def covered(self, step: int, oldest_kept: int) -> None:
        """Record that a durable checkpoint covers the steps up to `step`; the oldest checkpoint on disk is of step
        `oldest_kept`."""
        self._buffer.covered(step, oldest_kept)
        await self._settled()

    async def drain(self, reason: str) -> None:
        """Stop issuing prompts."""
        self._buffer.drain(reason)
        await self._settled()

    async def resume(self) -> None:
        """Issue prompts again, after an `end` or a `drain`."""
        self._buffer.resume()
        await self._settled()

    async def end(self) -> list[dict[str, Any]]:
        """End the run: groups without an optimizer step expire. Returns a sample of the trajectories that expired."""
        self._buffer.end()
        await self._settled()
        return self._lost.take()

    async def lost(self) -> list[dict[str, Any]]:
        """Return a sample of the trajectories that ended untrained since the last lease."""
        return self._lost.take()

    async def scorer_failures(self) -> tuple[dict[tuple[str, str], str], dict[str, tuple[int, float]], float]:
        """Return the message about the first failure for each (scorer, reason), `Scoring.refused`, and the seconds for
        which leases have waited for scorers."""
        return self._buffer.scoring.failures, self._buffer.scoring.refused(), self._telemetry.waited_for_scorers

    async def status(self) -> dict[str, Any]:
        """Return the status of the buffer."""
        return self._buffer.status().as_dict()

    async def stop(self) -> None:
        """End the background work and the reports; a run calls no other method of the buffer afterwards."""
        self._background.cancel()
        await asyncio.wait([self._background])
        self._telemetry.stop()

    async def _begin_lease(self, incarnation: int, wait_seconds: float) -> MiniBatch | Wait | Refusal | BatchJob:
        """Try to lease whenever the buffer changes, until the answer is not a `Wait` or `wait_seconds` have passed."""
        deadline = time.monotonic() + wait_seconds
        answer = self._buffer.begin_lease(incarnation)
        while isinstance(answer, Wait) and (left := deadline - time.monotonic()) > 0:
            began, scoring = time.monotonic(), len(self._buffer.ledger.scoring)
            playing = sum(self._buffer.ledger.in_state[state] for state in (GroupState.ISSUED, GroupState.OPEN))
            with suppress(TimeoutError):
                async with self._changed:
                    await asyncio.wait_for(self._changed.wait(), left)
            self._telemetry.waited_for_scorers += scoring / max(scoring + playing, 1) * (time.monotonic() - began)
            answer = self._buffer.begin_lease(incarnation)
        if not isinstance(answer, Wait):
            await self._settled()
        return answer

    async def _settled(self) -> None:
        """Serve the calls that wait for a change; returns when all events of the journal are on disk."""
        if self._served != self._buffer.revision:
            await self._wake()
        position = self._journal.position
        self._queued.set()
        async with self._flushed:
            await self._flushed.wait_for(lambda: self._journal.synced >= position or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    async def _wake(self) -> None:
        """Serve waiting claims; wake waiting leases and the task that asks scorers."""
        self._claims.look()
        self._served = self._buffer.revision
        if self._asking is not None and self._buffer.ledger.scoring:
            self._asking.look()
        async with self._changed:
            self._changed.notify_all()

    async def _work(self) -> None:
        """Sync the journal, check deadlines, ask scorers; an error is raised in calls that wait for the journal."""
        try:
            asking = [] if self._asking is None else [self._asking.run()]
            await asyncio.gather(self._flush(), self._tick(), *asking)
        except Exception as error:  # noqa: BLE001 - raised by `_settled`
            self._failure = error
            async with self._flushed:
                self._flushed.notify_all()

    async def _flush(self) -> None:
        """Sync the journal once for all events since the last sync."""
        while True:
            await self._queued.wait()
            self._queued.clear()
            next_sync = time.monotonic() + self._sync_seconds
            began = time.monotonic()
            await asyncio.to_thread(self._journal.sync)
            self._telemetry.synced(began)
            async with self._flushed:
                self._flushed.notify_all()
            await asyncio.sleep(next_sync - time.monotonic())

    async def _tick(self) -> None:
        """Check deadlines; sync events that no call waits for, and events that did not fit on a full disk before."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._buffer.tick()
            if self._journal.position > self._journal.synced:
                self._queued.set()
            self._claims.expire(time.monotonic())
            await self._wake()  # even without an event, because the disk may have room again
