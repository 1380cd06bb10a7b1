"""What `baton eval` is pointed at: a Hugging Face folder, a run, or a checkpoint of one.

models/Qwen3-0.6B               its weights
runs/quickstart                 final/, or else the newest checkpoint
runs/quickstart/checkpoints/step_40
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.checkpoints import MANIFEST, PREFIX
from service.config import load
from service.errors import UserError
from service.folders import earlier_of

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
    """The checkpoint's; None: the newest."""

    @property
    def settings(self) -> list[Path]:
        """Configuration files that come before those that are given."""
        return [] if self.run is None else [self.run / "config.yaml"]

    @property
    def checkpoints(self) -> Path:
        """Where the run's checkpoints are."""
        return (self.run or self.path) / CHECKPOINTS

    @property
    def begun_with(self) -> Path:
        """The model that the run began with: its shape and tokenizer are the checkpoint's."""
        if self.run is None:
            raise ValueError(f"{self.path} belongs to no run")
        return load(self.settings).config.model.path or self.run / "model"


def evaluated(path: Path) -> Evaluated:
    """What a path means.

    Raises:
        UserError: it is neither model nor run nor checkpoint.
    """
    if (path / "config.json").is_file():
        run = path.resolve().parent
        return Evaluated(path, run if path.name == FINAL and _is_run(run) else None, path)
    if (path / MANIFEST).is_file() and path.name.removeprefix(PREFIX).isdigit() and _is_run(path.resolve().parents[1]):
        return Evaluated(path, path.resolve().parents[1], None, int(path.name.removeprefix(PREFIX)))
    if _is_run(path):
        final = path / FINAL
        whole = [folder for folder in (final, earlier_of(final)) if (folder / "config.json").is_file()]
        return Evaluated(path, path.resolve(), whole[0] if whole else None)
    raise UserError(f"{path}: no model (config.json), no run folder (config.yaml) and no checkpoint ({MANIFEST})")


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()
