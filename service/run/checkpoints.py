"""A run's checkpoints: `step_<n>/` with the trainer's files, and a manifest that is written last.

A checkpoint without a readable manifest, or whose files differ from it, does not count, so a kill at any moment leaves
either the new checkpoint or the ones before it; there is no pointer to the newest that could disagree with the folders.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from service.errors import UserError
from service.files import sync, write_atomic

MANIFEST = "manifest.json"
PREFIX = "step_"
TRAINER = "trainer"
"""Folder of the ranks' files inside a checkpoint."""

_Stamps = list[tuple[int, int]] | None


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
    incarnation: int
    """The trainer's incarnation that wrote it."""
    journal_position: int
    """How far the buffer's journal was on the disk when the checkpoint was begun; it holds everything up to `step`."""
    issued: int
    """Prompts issued so far."""
    frontier: int
    """Every prompt below this group_id has come to its end."""
    files: dict[str, FileFacts]

    def check_journal(self, position: int, folder: Path) -> None:
        """The checkpoint can be gone on from only with the journal that it was written beside.

        Raises:
            UserError: the journal in `folder`, which ends at `position`, is not that one or has lost its end.
        """
        if position < self.journal_position:
            raise UserError(
                f"{folder}: the journal ends at position {position}, but the checkpoint of step {self.step} was "
                f"written when it stood at {self.journal_position}: it is another run's, or its end is lost. "
                "Bring it back, or begin a new run"
            )


class Checkpoints:
    """The checkpoints below one folder; keeps the newest `keep` whole ones."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._hashed: dict[int, _Stamps] = {}
        """What the files of a whole checkpoint looked like when they were hashed last."""

    def path(self, step: int) -> Path:
        """The folder of the checkpoint of a step."""
        return self._folder / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint of a step; what was there before is gone."""
        path = self.path(step)
        self._remove(step)
        path.mkdir(parents=True)
        return path

    def finish(self, step: int, incarnation: int, journal_position: int, issued: int, frontier: int) -> int:
        """Write the manifest over the files that are there; returns the oldest kept step.

        Drops checkpoints that are older than those that are kept, damaged, cut off while they were written, or of a
        later step: a run that writes this step has gone back behind it.
        """
        path = self.path(step)
        manifest = Manifest(
            step=step,
            incarnation=incarnation,
            journal_position=journal_position,
            issued=issued,
            frontier=frontier,
            files={str(file.relative_to(path)): _facts(file) for file in sorted(path.rglob("*")) if file.is_file()},
        )
        write_atomic(path / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        for folder in (path, self._folder):
            sync(folder)
        self._hashed[step] = self._stamps(manifest)
        self.drop_unfinished()
        readable = list(self._readable())
        kept = [found.step for found in readable if found.step <= step and self._still_whole(found)][: self._keep]
        for found in readable:
            if found.step not in kept:
                self._remove(found.step)
        return min(kept)

    def drop_unfinished(self) -> None:
        """Remove what was cut off while it was written; only whoever writes here may ask for it."""
        for step in self._steps():
            if not (self.path(step) / MANIFEST).exists():
                self._remove(step)

    def newest(self, at_most: int | None = None) -> Manifest | None:
        """The newest checkpoint (of a step up to `at_most`) whose files are what its manifest says; None if none is."""
        for manifest in self._readable():
            if (at_most is None or manifest.step <= at_most) and self._whole(manifest):
                return manifest
        return None

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in order; its files may be damaged."""
        return sorted(manifest.step for manifest in self._readable())

    def manifest(self, step: int) -> Manifest:
        """The manifest of a whole checkpoint.

        Raises:
            UserError: it is not whole; the message names the first file that is not what it must be.
        """
        path = self.path(step)
        try:
            manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        except FileNotFoundError:
            raise UserError(
                f"{path}: the checkpoint has no {MANIFEST}: it is being written, or its writer was killed; take another"
            ) from None
        except (OSError, ValidationError) as error:
            raise UserError(f"{path}: its {MANIFEST} is damaged ({_first(error)}); take another checkpoint") from error
        if manifest.step != step:
            raise UserError(f"{path}: its {MANIFEST} is of step {manifest.step}; take another checkpoint")
        for name, facts in manifest.files.items():
            if damage := _damage(path / name, facts):
                raise UserError(f"{path}: the checkpoint is damaged, {name} {damage}; take another one")
        return manifest

    def _readable(self) -> Iterator[Manifest]:
        """Manifests that can be read, newest step first."""
        for step in self._steps():
            try:
                yield Manifest.model_validate_json((self.path(step) / MANIFEST).read_bytes())
            except (OSError, ValidationError):
                continue

    def _steps(self) -> list[int]:
        """Steps that have a folder, newest first."""
        names = [path.name.removeprefix(PREFIX) for path in self._folder.glob(f"{PREFIX}*")]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _remove(self, step: int) -> None:
        self._hashed.pop(step, None)
        (self.path(step) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.path(step), ignore_errors=True)

    def _whole(self, manifest: Manifest) -> bool:
        path, stamps = self.path(manifest.step), self._stamps(manifest)
        if stamps is None or any(_facts(path / name) != facts for name, facts in manifest.files.items()):
            return False
        self._hashed[manifest.step] = stamps
        return True

    def _still_whole(self, manifest: Manifest) -> bool:
        """As `_whole`, but files that have not been touched since they were hashed are not read again."""
        stamps = self._stamps(manifest)
        return stamps is not None and (stamps == self._hashed.get(manifest.step) or self._whole(manifest))

    def _stamps(self, manifest: Manifest) -> _Stamps:
        """Size and time of change of each file; None where one is missing."""
        files = [self.path(manifest.step) / name for name in manifest.files]
        if not all(file.is_file() for file in files):
            return None
        return [(stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, files)]


def _first(error: OSError | ValidationError) -> str:
    """What is wrong, in a line."""
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error.strerror)


def _damage(file: Path, facts: FileFacts) -> str | None:
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != facts.bytes:
        return f"has {size} bytes instead of {facts.bytes}"
    return "has other bytes than were written" if _facts(file) != facts else None


def _facts(file: Path) -> FileFacts:
    hasher = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 22):
            hasher.update(chunk)
    return FileFacts(bytes=file.stat().st_size, xxh3_64=hasher.hexdigest())
