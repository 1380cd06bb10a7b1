"""Writes checkpoints: first the files of the trainer's ranks, then the manifest; then the buffer is notified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from actors.calls import call
from service.config import Config
from service.run.checkpoints import TRAINER, Checkpoints, Manifest
from service.run.folder import CHECKPOINTS
from service.types import PolicyVersion

if TYPE_CHECKING:
    from actors.driver.cluster import Cluster


class _Begun(NamedTuple):
    version: PolicyVersion
    status: dict[str, Any]
    """The buffer's status when the checkpoint was begun."""
    at: float
    """When it was begun, in seconds of the monotonic clock."""


class Checkpointer:
    """Writes checkpoints while training goes on; one is complete when every rank has written its files."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        cluster: Cluster,
        checkpointed: Callable[[int, float], None] = lambda step, began: None,
    ) -> None:
        """`checkpointed`: is given the step of each durable checkpoint, and when it was begun."""
        self._checkpoints = Checkpoints(run_folder / CHECKPOINTS, config.trainer.keep_checkpoints)
        self._buffer, self._trainer = cluster.buffer, cluster.trainer
        self._checkpointed = checkpointed
        self._begun: _Begun | None = None

    def path(self, step: int) -> Path:
        """The folder of the ranks' files in the checkpoint of a step."""
        return self._checkpoints.path(step) / TRAINER

    def newest(self) -> Manifest | None:
        """The newest whole checkpoint."""
        return self._checkpoints.newest()

    async def begin(self, version: PolicyVersion) -> None:
        """Copy the trainer's state, and start to write the copy."""
        await self.settle()
        at = time.monotonic()
        status = await call(self._buffer.status, who="the buffer")
        folder = await asyncio.to_thread(self._checkpoints.begin, version.step)
        await self._trainer.save(folder / TRAINER)
        self._begun = _Begun(version, status, at)

    async def settle(self) -> None:
        """Wait for the files of the begun checkpoint, write its manifest, and notify the buffer."""
        if self._begun is None:
            return
        (step, incarnation), status = (self._begun.version.step, self._begun.version.incarnation), self._begun.status
        await self._trainer.finish_save()
        oldest_kept = await asyncio.to_thread(
            self._checkpoints.finish, step, incarnation, status["journal_synced"], status["issued"], status["frontier"]
        )
        await call(self._buffer.covered, step, oldest_kept, who="the buffer")
        self._checkpointed(step, self._begun.at)
        self._begun = None

    def abandon(self) -> None:
        """Give up the checkpoint that was begun: the ranks that were writing it died."""
        self._begun = None
