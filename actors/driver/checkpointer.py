"""Writes checkpoints: first the files of the trainer's ranks, then the manifest; then the buffer is notified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.calls import call
from service.config import Config
from service.run.checkpoints import TRAINER, Checkpoints, Manifest
from service.run.folder import CHECKPOINTS, JOURNAL
from service.store.uploads import Uploads

if TYPE_CHECKING:
    from actors.driver.cluster import Cluster


UPLOAD_ATTEMPTS = 3
"""Maximum attempts to open the journal for an upload; an attempt fails if a segment is removed meanwhile."""


class Checkpointer:
    """Writes checkpoints while training continues; a checkpoint is complete when every rank has written its files."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        cluster: Cluster,
        checkpointed: Callable[[int, float], None] = lambda step, began: None,
        uploads: Uploads | None = None,
    ) -> None:
        """Store the settings; `checkpointed` is called with the step of each durable checkpoint and its start time."""
        self._run, self._uploads = run_folder, uploads
        self._checkpoints = Checkpoints(run_folder / CHECKPOINTS, config.trainer.keep_checkpoints)
        self._buffer, self._trainer = cluster.buffer, cluster.trainer
        self._checkpointed = checkpointed
        self._begun: tuple[int, int, float] | None = None
        """The unfinished checkpoint's step, the journal's position at its start, and its start time (monotonic)."""
        self._completing: asyncio.Task[None] | None = None
        """The task that completes the newest checkpoint whose files are written."""

    def path(self, step: int) -> Path:
        """Return the folder of the ranks' files in the checkpoint of a step."""
        return self._checkpoints.path(step) / TRAINER

    def newest(self) -> Manifest | None:
        """Return the newest complete checkpoint."""
        return self._checkpoints.newest()

    async def resume(self, manifest: Manifest) -> None:
        """Let the buffer continue from a checkpoint; `UserError` if the journal is of another run, or ends before the
        checkpoint."""
        status = await call(self._buffer.status, who="the buffer")
        manifest.check_journal(status["journal_synced"], self._run / JOURNAL)
        await call(self._buffer.resume, who="the buffer")
        # Again, because the journal may not have it: a restored journal ends earlier, or the run was killed before.
        kept = await asyncio.to_thread(self._checkpoints.steps)
        await call(self._buffer.covered, manifest.step, min([manifest.step, *kept]), who="the buffer")

    async def begin(self, step: int) -> None:
        """Copy the trainer's state, and start to write the copy to disk; do nothing if the step has a checkpoint."""
        await self.settle()
        newest = await asyncio.to_thread(self.newest)
        if newest is not None and newest.step == step:  # writing it again would delete the complete one first
            return
        at = time.monotonic()
        status = await call(self._buffer.status, who="the buffer")
        folder = await asyncio.to_thread(self._checkpoints.begin, step)
        await self._trainer.save(folder / TRAINER)
        self._begun = step, status["journal_synced"], at

    async def settle(self) -> None:
        """Wait for the files of the unfinished checkpoint, write its manifest, and notify the buffer."""
        if self._begun is None:
            return
        await self._trainer.finish_save()
        self._completing = asyncio.ensure_future(self._complete(*self._begun))
        await asyncio.shield(self._completing)  # the files are complete, also if the trainer is lost now

    async def _complete(self, step: int, journal_position: int, at: float) -> None:
        oldest_kept = await asyncio.to_thread(self._checkpoints.finish, step, journal_position)
        await call(self._buffer.covered, step, oldest_kept, who="the buffer")
        self._checkpointed(step, at)
        if self._uploads is not None:
            await self._upload(self._uploads, step)
        self._begun = None

    async def _upload(self, uploads: Uploads, step: int) -> None:
        for _ in range(UPLOAD_ATTEMPTS):
            status = await call(self._buffer.status, who="the buffer")
            journal = status["journal_start"], status["journal_synced"]
            if await asyncio.to_thread(uploads.checkpoint, step, *journal):
                return

    @property
    def completes(self) -> bool:
        """Return True if a checkpoint's files are written, but the buffer has not been notified of the checkpoint
        yet."""
        return self._completing is not None and not self._completing.done()

    async def abandon(self) -> None:
        """Discard the unfinished checkpoint, because the ranks that were writing it died."""
        if self._completing is not None:
            await self._completing
        self._begun = None
