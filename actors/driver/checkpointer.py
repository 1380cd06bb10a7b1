"""Checkpoints as one act of trainer and buffer: files, then the manifest, then the buffer hears of it."""

from __future__ import annotations

import asyncio
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
    """The buffer's, when the checkpoint was begun."""


class Checkpointer:
    """Begins a checkpoint while training goes on, and makes it count once every rank has written."""

    def __init__(self, config: Config, run_folder: Path, cluster: Cluster) -> None:
        self._checkpoints = Checkpoints(run_folder / CHECKPOINTS, config.trainer.keep_checkpoints)
        self._buffer, self._trainer = cluster.buffer, cluster.trainer
        self._begun: _Begun | None = None

    def path(self, step: int) -> Path:
        """Where the ranks' files of a checkpoint are."""
        return self._checkpoints.path(step) / TRAINER

    def newest(self) -> Manifest | None:
        """The newest whole checkpoint."""
        return self._checkpoints.newest()

    async def begin(self, version: PolicyVersion) -> None:
        """Copy the trainer's state; it is written while training goes on."""
        await self.settle()
        status = await call(self._buffer.status, who="the buffer")
        folder = await asyncio.to_thread(self._checkpoints.begin, version.step)
        await self._trainer.save(folder / TRAINER)
        self._begun = _Begun(version, status)

    async def settle(self) -> None:
        """Make what was begun durable: the manifest, then the buffer may count its groups as trained."""
        if self._begun is None:
            return
        (step, incarnation), status = (self._begun.version.step, self._begun.version.incarnation), self._begun.status
        await self._trainer.finish_save()
        oldest_kept = await asyncio.to_thread(
            self._checkpoints.finish, step, incarnation, status["journal_synced"], status["issued"], status["frontier"]
        )
        await call(self._buffer.covered, step, oldest_kept, who="the buffer")
        self._begun = None

    def forget(self) -> None:
        """The ranks that were writing are gone."""
        self._begun = None
