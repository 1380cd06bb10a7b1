"""A run's checkpoints: `step_<n>/` with the trainer's files, and a manifest that is written last.

A checkpoint without a readable manifest, or whose files differ from it, does not count, so a kill at any moment leaves
either the new checkpoint or the ones before it; there is no pointer to the newest that could disagree with the folders.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from service.runfolder import write_whole

MANIFEST = "manifest.json"
PREFIX = "step_"


class FileFacts(BaseModel):
    """What one file of a checkpoint must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    xxh3_64: str


class Manifest(BaseModel):
    """What a checkpoint holds; whoever finds it whole may rely on the rest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = 1
    step: int
    """Optimizer steps that the weights have had."""
    epoch: int
    """The trainer's incarnation that wrote it."""
    journal_position: int
    """Where the buffer's journal stood when the checkpoint was begun; it holds everything up to `step`."""
    issued: int
    """Prompts issued so far."""
    frontier: int
    """Every prompt below this ordinal has come to its end."""
    files: dict[str, FileFacts]


class Checkpoints:
    """The checkpoints below one folder; keeps the newest `keep`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self._folder / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of a step; what was there before is gone."""
        path = self.path(step)
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, step: int, epoch: int, journal_position: int, issued: int, frontier: int) -> int:
        """Write the manifest over the files that are there and drop old checkpoints; returns the oldest kept step."""
        path = self.path(step)
        manifest = Manifest(
            step=step,
            epoch=epoch,
            journal_position=journal_position,
            issued=issued,
            frontier=frontier,
            files={str(file.relative_to(path)): _facts(file) for file in sorted(path.rglob("*")) if file.is_file()},
        )
        write_whole(path / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        for folder in (path, self._folder):
            _sync_folder(folder)
        steps = [found.step for found in self._readable()]
        for old in steps[self._keep :]:
            self.begin(old).rmdir()
        return min(steps[: self._keep])

    def newest(self, at_most: int | None = None) -> Manifest | None:
        """The newest checkpoint (of a step up to `at_most`) whose files are what its manifest says; None if none is."""
        for manifest in self._readable():
            if (at_most is None or manifest.step <= at_most) and self._whole(manifest):
                return manifest
        return None

    def _readable(self) -> Iterator[Manifest]:
        """Manifests that can be read, newest step first."""
        names = [path.name.removeprefix(PREFIX) for path in self._folder.glob(f"{PREFIX}*")]
        for step in sorted((int(name) for name in names if name.isdigit()), reverse=True):
            try:
                yield Manifest.model_validate_json((self.path(step) / MANIFEST).read_bytes())
            except (FileNotFoundError, ValidationError):
                continue

    def _whole(self, manifest: Manifest) -> bool:
        path = self.path(manifest.step)
        return all((path / name).is_file() and _facts(path / name) == facts for name, facts in manifest.files.items())


def _facts(file: Path) -> FileFacts:
    hasher = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 22):
            hasher.update(chunk)
    return FileFacts(bytes=file.stat().st_size, xxh3_64=hasher.hexdigest())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
