"""Writes checkpoints: the files of the trainer's ranks, then the manifest. Then it notifies the buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from actors.calls import call, may_be_dropped
from service.config import Config
from service.run.checkpoints import TRAINER, Checkpoints, Manifest
from service.run.folder import CHECKPOINTS, JOURNAL
from service.store.uploads import Uploads

if TYPE_CHECKING:
    from actors.driver.cluster import Cluster


UPLOAD_ATTEMPTS = 3
"""Maximum attempts to open the journal for an upload; an attempt fails if a segment is removed meanwhile."""


class Checkpointer:
    """Writes checkpoints while training continues. A checkpoint is complete when every rank has written its files."""

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
        self.newest = self._checkpoints.newest
        self._buffer, self._trainer = cluster.buffer, cluster.trainer
        self._checkpointed = checkpointed
        self._every, self._begun_at = config.trainer.checkpoint_every, 0
        """Steps between two checkpoints, and the step of the newest checkpoint, complete or not."""
        self._is_model_folder = config.model.lora is None and config.model.warm_start is None
        """Whether the ranks have the state of step 0 as soon as they have loaded the model."""
        self._writing: asyncio.Task[None] | None = None
        """The task that completes the newest checkpoint."""
        self._has_files = False
        """Whether the newest checkpoint has all files of the ranks, or needs none."""

    def path(self, step: int) -> Path:
        """Return the folder of the ranks' files in the checkpoint of a step."""
        return self._checkpoints.path(step) / TRAINER

    @property
    def completes(self) -> bool:
        """Return whether a checkpoint's files are written, but the buffer has not been notified of it yet."""
        return self._has_files and self._writing is not None and not self._writing.done()

    async def resume(self, manifest: Manifest) -> None:
        """Let the buffer continue from a checkpoint. `UserError` if the journal belongs to another run, or ends before
        the checkpoint."""
        status = await call(self._buffer.status, who="the buffer")
        manifest.check_journal(status["journal_synced"], self._run / JOURNAL)
        await call(self._buffer.resume, who="the buffer")
        # The journal may lack this event, if it was restored from a store or the run was killed early.
        kept = await asyncio.to_thread(self._checkpoints.steps)
        await call(self._buffer.covered, manifest.step, min([manifest.step, *kept]), who="the buffer")

    def go_on_from(self, step: int) -> None:
        """Note that the run begins or goes on with the state of this step."""
        self._begun_at = step

    async def follow(self, step: int) -> None:
        """Begin a checkpoint if one is due after this step. If the last checkpoint is still being written, training
        goes on and the next checkpoint waits. An error of the last checkpoint is raised."""
        if self._writing is not None and not self._writing.done():
            return
        await self.settle()
        if self._every and step // self._every > self._begun_at // self._every:
            await self.begin(step)

    async def begin(self, step: int) -> None:
        """Copy the trainer's state, and start to write the copy to disk. Do nothing if the step has a checkpoint. The
        state of step 0 is not written if the model folder has it."""
        await self.settle()
        if step and step == self._begun_at:  # beginning it again would delete it
            return
        self._begun_at, self._has_files = step, not step and self._is_model_folder
        at = time.monotonic()
        status = await call(self._buffer.status, who="the buffer")
        folder = await asyncio.to_thread(self._checkpoints.begin, step)
        if not self._has_files:
            await self._trainer.save(folder / TRAINER)
        self._writing = asyncio.ensure_future(self._complete(step, status["journal_synced"], at))
        may_be_dropped(self._writing)

    async def settle(self) -> None:
        """Wait until the begun checkpoint is complete. If it failed, raise its error."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    async def _complete(self, step: int, journal_position: int, at: float) -> None:
        """Wait for the files of the ranks, write the manifest, and notify the buffer."""
        if not self._has_files:
            await self._trainer.finish_save()
        self._has_files = True  # also if the trainer is lost now
        oldest_kept = await asyncio.to_thread(self._checkpoints.finish, step, journal_position)
        await call(self._buffer.covered, step, oldest_kept, who="the buffer")
        self._checkpointed(step, at)
        if self._uploads is not None:
            await self._upload(self._uploads, step)

    async def _upload(self, uploads: Uploads, step: int) -> None:
        for _ in range(UPLOAD_ATTEMPTS):
            status = await call(self._buffer.status, who="the buffer")
            journal = status["journal_start"], status["journal_synced"]
            if await asyncio.to_thread(uploads.checkpoint, step, *journal):
                return

    def reached(self, step: int) -> int:
        """Return `step`, or the step of the newest checkpoint if this checkpoint may be incomplete."""
        return step if self._writing is None else self._begun_at

    async def abandon(self) -> None:
        """Discard the unfinished checkpoint, because the ranks that were writing it died."""
        writing, self._writing = self._writing, None
        if writing is not None and self._has_files:
            await writing
        elif writing is not None:
            writing.cancel()
