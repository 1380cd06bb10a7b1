"""Sends waiting groups to scorers without blocking the buffer.

    group 7 waits for judge -> a free worker of judge: ask -> accept | failed, and again | give_up

Each worker is asked about one group at a time, so a group that makes its scorer hang or die costs no other group an
attempt, and a group that pauses before its next attempt keeps no worker. A group is in memory a second time, encoded,
only while a worker scores it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from service.backoff import Backoff, retried
from service.config.rollout import ScorerConfig
from service.handoff.scoring import Scoring
from service.handoff.steps.wire import encode as encode_group
from service.scorers.reply import Failure, ScorerFailed, answer_from

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""First and longest pause, in seconds, before a scorer is asked again about a group."""

START_SECONDS = 600.0
"""Seconds in which a worker that ended must start again."""

log = logging.getLogger(__name__)


class Worker(Protocol):
    """Scores one group at a time: a scorer's process, or one of the concurrent requests to a teacher's process."""

    async def ready(self) -> None:
        """Wait until the worker has started; raises `ScorerFailed` if it does not start."""

    async def ask(self, row: int, group: bytes) -> bytes:
        """Return the reply about a group, whose prompt is row `row` of the dataset; raises `ScorerFailed` if no reply
        comes."""

    def renew(self) -> None:
        """Replace the worker's process, if it has one, because it does not answer."""


class Asking:
    """Distributes groups to the workers of all scorers."""

    def __init__(
        self,
        settings: Mapping[str, ScorerConfig],
        scoring: Scoring,
        workers: Mapping[str, Sequence[Worker]],
        settled: Callable[[], Awaitable[None]],
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        """`settled` returns when all events of the journal until now are on disk."""
        self._settings = settings
        self._scoring = scoring
        self._idle = {name: asyncio.Queue[Worker]() for name in settings}
        for name, idle in self._idle.items():
            for worker in workers[name]:
                idle.put_nowait(worker)
        self._asked: set[tuple[str, int]] = set()
        self._settled = settled
        self._first_pause = first_pause
        self._look = asyncio.Event()
        self._look.set()

    def look(self) -> None:
        """Make `run` look for groups to score, because something has changed."""
        self._look.set()

    async def run(self) -> None:
        """Send groups to scorers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._look.wait()
                self._look.clear()
                for name in self._settings:
                    for group_id in self._scoring.pending(name):
                        if (name, group_id) not in self._asked:
                            self._asked.add((name, group_id))
                            tasks.create_task(self._score(name, group_id))

    async def _score(self, name: str, group_id: int) -> None:
        """Score one group: retries until there is an answer, or no attempt is left."""

        def note(failed: ScorerFailed) -> None:
            log.warning("scorer %s gave no good answer about group=%d: %s", name, group_id, failed)
            self._scoring.failed(name, str(failed.reason), failed.detail)

        ask = partial(self._with_worker, name, group_id)
        backoff = Backoff(self._first_pause, LONGEST_PAUSE)
        try:
            await retried(ask, ScorerFailed, backoff, tries=self._settings[name].attempts, failed=note)
        except ScorerFailed as failed:
            note(failed)
            self._scoring.give_up(group_id, name, str(failed.reason))
        await self._settled()
        self._asked.discard((name, group_id))

    async def _with_worker(self, name: str, group_id: int) -> None:
        """Wait for a free worker, and ask it once about a group, unless the group's score is no longer needed."""
        worker = await self._idle[name].get()
        began = asyncio.get_running_loop().time()
        try:
            if self._scoring.awaits(group_id, name):
                row, group = self._scoring.group(group_id)
                await self._ask(name, group_id, worker, row, await asyncio.to_thread(encode_group, group))
                await self._settled()
        finally:
            self._scoring.took(name, asyncio.get_running_loop().time() - began)
            self._idle[name].put_nowait(worker)

    async def _ask(self, name: str, group_id: int, worker: Worker, row: int, group: bytes) -> None:
        """Ask a worker once about a group.

        Raises:
            ScorerFailed: there was no answer, or it was refused.
        """
        settings, reason = self._settings[name], Failure.START
        within = START_SECONDS
        try:
            async with asyncio.timeout(within):
                await worker.ready()
            reason, within = Failure.DEADLINE, settings.deadline
            async with asyncio.timeout(within):
                data = await worker.ask(row, group)
        except TimeoutError:
            worker.renew()
            raise ScorerFailed(reason, f"no answer within {within:g} s") from None
        refused = self._scoring.accept(group_id, name, answer_from(data, room=len(group)))
        if refused is not None:
            raise ScorerFailed(refused.reason, str(refused))
