"""A run that goes on: the checkpoint from which it does, and what must be as it was when the run began.

Everything is checked before Ray starts, so a refusal takes no time and leaves the run as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.config import Config
from service.errors import UserError
from service.files import recover_folder
from service.run.checkpoints import Checkpoints, Manifest
from service.run.folder import CHECKPOINTS, FINAL, lock_run


@contextmanager
def resumed(config: Config, path: Path) -> Iterator[Manifest]:
    """Hold the lock of a run's folder; yields the checkpoint from which the run goes on.

    Files that a killed writer left unfinished are deleted.

    Raises:
        UserError: the run goes on already, there is no whole checkpoint, or the run has taken all its steps.
    """
    with lock_run(path):
        checkpoints = Checkpoints(path / CHECKPOINTS, config.trainer.keep_checkpoints)
        checkpoints.drop_unfinished()
        recover_folder(path / FINAL)
        manifest = checkpoints.newest()
        if manifest is None:
            raise UserError(f"{path}: {_why_none(config, checkpoints)}; begin a new run")
        if manifest.step >= config.run.max_steps:
            raise UserError(f"{path}: the run has all of its {manifest.step} steps; raise run.max_steps to continue")
        yield manifest


def _why_none(config: Config, checkpoints: Checkpoints) -> str:
    if damaged := checkpoints.steps():
        return f"every checkpoint is damaged (of step {', '.join(map(str, damaged))})"
    if not config.trainer.checkpoint_every:
        return "there is no checkpoint to resume from, because trainer.checkpoint_every is 0"
    return "there is no checkpoint to resume from: the run ended before its first one was written"
