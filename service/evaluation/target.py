"""What `baton eval` is pointed at: a Hugging Face folder, a run, or a checkpoint of one.

models/Qwen3-0.6B               its weights
runs/quickstart                 final/, or else the newest checkpoint
runs/quickstart/checkpoints/step_40
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from service.config import Config
from service.config.paths import near
from service.errors import UserError
from service.files import earlier_of
from service.run.checkpoints import MANIFEST, PREFIX, Checkpoints, Manifest
from service.run.folder import write_whole

CONFIG = "config.yaml"
FINAL = "final"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Evaluated:
    """Weights to be evaluated."""

    path: Path
    """As given."""
    run: Path | None
    """The run folder they belong to; None: they belong to none."""
    model: Path | None
    """Their Hugging Face folder; None: they are a checkpoint's."""
    step: int | None = None
    """The checkpoint's; None: the newest that is whole."""

    @property
    def settings(self) -> list[Path]:
        """Configuration files that come before those that are given."""
        return [] if self.run is None else [self.run / CONFIG]

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are."""
        return (self.run or self.path) / CHECKPOINTS

    def begun_with(self, config: Config) -> Path:
        """The model that the run began with: its shape and tokenizer are the checkpoint's."""
        if self.run is None:
            raise ValueError(f"{self.path} belongs to no run")
        return config.model.path or self.run / "model"

    def weights(self, manifest: Manifest | None) -> Path:
        """Where they are: a Hugging Face folder, or the checkpoint of a manifest."""
        if manifest is not None:
            return Checkpoints(self.checkpoints, keep=1).path(manifest.step)
        if self.model is None:
            raise ValueError(f"{self.path} is no model")
        return self.model

    def manifest(self) -> Manifest:
        """The checkpoint that is meant: of the step that was named, or the newest whole one.

        Raises:
            UserError: there is none, or it is not whole.
        """
        checkpoints = Checkpoints(self.checkpoints, keep=1)
        if self.step is not None:
            return checkpoints.manifest(self.step)
        steps = checkpoints.steps()
        if not steps:
            raise UserError(
                f"{self.path}: the run has neither final weights nor a checkpoint; wait for one, or evaluate "
                f"{self.path / 'model'}"
            )
        return checkpoints.newest() or checkpoints.manifest(steps[-1])


def evaluated(path: Path) -> Evaluated:
    """What a path means.

    Raises:
        UserError: it is neither model nor run nor checkpoint, or a checkpoint that is not there.
    """
    whole = path.resolve()
    run = whole.parent
    if (path / "config.json").is_file():
        return Evaluated(path, run if whole.name == FINAL and _is_run(run) else None, path)
    if _is_run(path):
        final = path / FINAL
        found = [folder for folder in (final, earlier_of(final)) if (folder / "config.json").is_file()]
        return Evaluated(path, whole, found[0] if found else None)
    if _is_run(run) and whole.name == CHECKPOINTS:
        raise UserError(f"{path}: name the run, {run}, or one of its checkpoints: {_listed(whole)}")
    step = whole.name.removeprefix(PREFIX)
    if whole.name.startswith(PREFIX) and step.isdecimal():
        return _checkpoint(path, int(step))
    if not path.exists():
        raise UserError(f"{path}: there is no such folder{near(path)}; give a model, a run or a checkpoint of one")
    raise UserError(f"{path}: no model (config.json), no run folder (config.yaml) and no checkpoint ({MANIFEST})")


def _checkpoint(path: Path, step: int) -> Evaluated:
    folder = path.resolve()
    run = folder.parents[1]
    if folder.parent.name != CHECKPOINTS or not _is_run(run):
        raise UserError(
            f"{path}: the checkpoint lies in no run folder, whose {CONFIG} and model it needs; give "
            f"RUN/{CHECKPOINTS}/{path.name}"
        )
    if not folder.is_dir():
        raise UserError(f"{path}: there is no checkpoint of step {step}; there are {_listed(folder.parent, step)}")
    return Evaluated(path, run, None, step)


def _listed(folder: Path, step: int | None = None) -> str:
    """The checkpoints in a folder by name; with a step, only those next to it."""
    steps = Checkpoints(folder, keep=1).steps()
    if step is not None:
        earlier, later = [one for one in steps if one < step], [one for one in steps if one > step]
        steps = [*earlier[-1:], *later[:1]]
    return ", ".join(f"{PREFIX}{one}" for one in steps) or "none"


def check_output(file: Path) -> None:
    """Raises `UserError` where results could not be written to this file."""
    if file.is_dir():
        raise UserError(f"--output {file}: is a folder; give a file")
    if not file.parent.is_dir():
        raise UserError(f"--output {file}: there is no folder {file.parent}{near(file.parent)}; make it first")
    if not os.access(file if _is_written_through(file) else file.parent, os.W_OK):
        raise UserError(f"--output {file}: cannot be written; give a file that can")


def write_output(file: Path, text: str) -> None:
    """Write results: a file appears whole or not at all; links, pipes and devices are written through, and stay."""
    if _is_written_through(file):
        file.write_text(text, encoding="utf-8")
    else:
        write_whole(file, text)


def _is_written_through(file: Path) -> bool:
    return file.is_symlink() or (file.exists() and not file.is_file())


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file()
