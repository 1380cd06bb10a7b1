"""Asks scorers about the groups that wait for them, without holding up the buffer.

    group 7 waits for judge -> a free worker of judge: ask -> accept | failed, and again | give_up

Each worker is asked about one group at a time, so a group that makes its scorer hang or die costs no other group an
attempt. Only as many groups as there are workers are in memory a second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from service.config.rollout import ScorerConfig
from service.handoff.scoring import Scoring
from service.handoff.steps.wire import encode as encode_group
from service.scorers.reply import Failure, Request, ScorerFailed, answer_from, encode
from service.types import StepGroup

FIRST_PAUSE = 0.5
"""Seconds before a scorer is asked again about a group; each further pause is twice as long."""
LONGEST_PAUSE = 30.0

log = logging.getLogger(__name__)


class Worker(Protocol):
    """A scorer's process, or one of the requests that its address takes at once."""

    async def ready(self) -> None:
        """Wait until it has started; raises `ScorerFailed` if it does not."""

    async def ask(self, request: bytes) -> bytes:
        """The reply to a request; raises `ScorerFailed`."""

    def renew(self) -> None:
        """End it, if it is a process, because it does not answer; another one takes its place."""


class Asking:
    """Keeps the workers of all scorers busy."""

    def __init__(
        self,
        settings: Mapping[str, ScorerConfig],
        scoring: Scoring,
        workers: Mapping[str, Sequence[Worker]],
        settled: Callable[[], Awaitable[None]],
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        """`settled` returns when the journal is on disk."""
        self._settings = settings
        self._scoring = scoring
        self._idle = {name: [*workers[name]] for name in settings}
        self._asked: set[tuple[str, int]] = set()
        self._settled = settled
        self._first_pause = first_pause
        self._look = asyncio.Event()
        self._look.set()

    def look(self) -> None:
        """Look for groups to score; something changed."""
        self._look.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._look.wait()
                self._look.clear()
                for name, idle in self._idle.items():
                    for group_id in self._scoring.pending(name) if idle else ():
                        if idle and (name, group_id) not in self._asked:
                            self._asked.add((name, group_id))
                            # Not later: before the task begins, the group may have ended.
                            row, group = self._scoring.group(group_id)
                            tasks.create_task(self._score(name, group_id, row, group, idle.pop()))

    async def _score(self, name: str, group_id: int, row: int, group: StepGroup, worker: Worker) -> None:
        """Score one group: an answer, or the end of all attempts."""
        began = asyncio.get_running_loop().time()
        request = encode(Request(row, await asyncio.to_thread(encode_group, group)))
        failure = None
        for attempt in range(self._settings[name].attempts):
            if attempt:
                await asyncio.sleep(min(self._first_pause * 2 ** (attempt - 1), LONGEST_PAUSE))
            if not self._scoring.awaits(group_id, name):
                failure = None
                break
            failure = await self._ask(name, group_id, worker, request)
            if failure is None:
                break
            log.warning("scorer %s gave no good answer about group=%d: %s: %s", name, group_id, *failure)
            self._scoring.failed(name, *failure)
        if failure is not None:
            self._scoring.give_up(group_id, name, failure[0])
        self._scoring.took(name, asyncio.get_running_loop().time() - began)
        await self._settled()
        self._asked.discard((name, group_id))
        self._idle[name].append(worker)
        self.look()

    async def _ask(self, name: str, group_id: int, worker: Worker, request: bytes) -> tuple[str, str] | None:
        """Ask once; returns (reason, detail) of a failure, None where the answer was accepted."""
        settings, started = self._settings[name], False
        try:
            async with asyncio.timeout(settings.start_deadline):
                await worker.ready()
            started = True
            async with asyncio.timeout(settings.deadline):
                data = await worker.ask(request)
            refused = self._scoring.accept(group_id, name, answer_from(data, room=len(request)))
        except TimeoutError:
            worker.renew()
            within = settings.deadline if started else settings.start_deadline
            return str(Failure.DEADLINE if started else Failure.START), f"no answer within {within:g} s"
        except ScorerFailed as failed:
            return str(failed.reason), failed.detail
        return None if refused is None else (str(refused.reason), str(refused))
