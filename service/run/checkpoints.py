"""Checkpoints of a run. Each is a folder `step_<n>/` with the trainer's files, and a manifest that is written last.

A checkpoint counts only if its manifest is readable and its files match the manifest. So if the process is killed, at
any moment, at least one of the new and the earlier checkpoints is complete. No file names the newest checkpoint: it is
the folder with the highest step.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from service.errors import UserError
from service.files import sync, write_atomic

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
"""Number of the manifest's format. Each version of Baton reads only its own format."""

PREFIX = "step_"
TRAINER = "trainer"
"""Folder inside a checkpoint that holds the files of the trainer's ranks."""

_STEP = re.compile(rf"{PREFIX}(0|[1-9]\d{{0,17}})", re.ASCII)

WRITTEN_BYTES = 16 << 20
"""Bytes that are written to measure the speed of a disk."""
SLOW_SECONDS = 600.0
"""A disk is slow if a checkpoint takes more than this number of seconds."""
MIN_FREE_BYTES = 20e9

_Stamps = list[tuple[int, int]]
"""Size in bytes and time of change of each file."""


class _OtherFormat(UserError):
    """Raised if another version of Baton wrote the manifest."""


class FileChecksum(BaseModel):
    """Size and checksum of one file in a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int
    xxh3_64: str


class Manifest(BaseModel):
    """The manifest of a checkpoint: its step, its position in the buffer's journal, and its files. Fields that earlier
    versions wrote are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: int = FORMAT
    step: int
    """Number of optimizer steps that produced the checkpoint's weights."""
    journal_position: int
    """Position up to which the buffer's journal was on disk when the checkpoint began. All events up to the
    checkpoint's step come before this position."""
    files: dict[str, FileChecksum]

    @model_validator(mode="before")
    @classmethod
    def _is_of_this_format(cls, raw: dict[str, object]) -> dict[str, object]:
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise _OtherFormat(
                f"is of format {raw['format']!s:.20}, this Baton reads format {FORMAT}: use the Baton that wrote it"
            )
        return raw

    def check_journal(self, position: int, folder: Path) -> None:
        """Raises `UserError` if the journal in `folder` ends, at `position`, before the checkpoint."""
        if position < self.journal_position:
            raise UserError(
                f"{folder}: the journal ends at position {position}, but the checkpoint of step {self.step} was "
                f"written at position {self.journal_position}: the journal is another run's, or its end is lost; bring "
                "the journal back, or begin a new run"
            )


class Checkpoints:
    """The checkpoints in one folder; only the newest `keep` complete checkpoints are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._hashed: dict[int, _Stamps] = {}
        """By step: the stamps of its files when they last matched the manifest."""

    def path(self, step: int) -> Path:
        """The folder for the checkpoint of a step."""
        return self._folder / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """Make an empty folder for the checkpoint of a step. If the step already has a checkpoint, it is deleted."""
        path = self.path(step)
        self._remove(step)
        path.mkdir(parents=True)
        return path

    def finish(self, step: int, journal_position: int) -> int:
        """Complete the checkpoint of a step by writing its manifest. Returns the step of the oldest checkpoint that is
        kept. Deletes checkpoints that are too old, damaged, unfinished, or of a later step (left by a trainer before
        its restart)."""
        path = self.path(step)
        manifest = Manifest(
            step=step,
            journal_position=journal_position,
            files={str(file.relative_to(path)): _checksum(file) for file in sorted(path.rglob("*")) if file.is_file()},
        )
        write_atomic(path / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        for folder in (path, self._folder):
            sync(folder)
        self._hashed[step] = self._stamps(manifest)
        readable = [found for found in self._readable() if found.step <= step]
        # Files that have not changed since they were last hashed are not read again.
        whole = (one for one in readable if self._stamps(one) == self._hashed.get(one.step) or self._is_whole(one.step))
        kept = [found.step for found in whole][: self._keep]
        for other in self._steps():
            if other not in kept:
                try:
                    self._remove(other)
                except OSError as error:
                    if other > step:  # else it would count as the newest checkpoint
                        raise
                    log.warning("an old checkpoint stays: %s", error)
        return min(kept)

    def drop_unfinished(self) -> None:
        """Delete checkpoints without a manifest: a killed writer left them. Only the run's own process may call
        this."""
        for step in self._steps():
            if not (self.path(step) / MANIFEST).exists():
                self._remove(step)

    def newest(self) -> Manifest | None:
        """The manifest of the newest checkpoint whose files match it; None if there is none. Logs a warning for each
        newer checkpoint that is damaged. `UserError` if a checkpoint has another format: the next one would delete
        it."""
        list(self._readable())  # raises if a checkpoint has another format
        damaged: list[UserError] = []
        for step in reversed(self.steps()):
            try:
                manifest = self.manifest(step)
            except UserError as error:
                damaged.append(error)
                continue
            for reason in damaged:
                log.warning("%s: that of step %d is taken", reason, step)
            return manifest
        return None

    def steps(self) -> list[int]:
        """The steps of all checkpoints that have a manifest, in order. Manifests and files are not checked."""
        return [step for step in reversed(self._steps()) if (self.path(step) / MANIFEST).exists()]

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step's checkpoint. `UserError` if there is none, or a file does not match it; names the
        first such file."""
        path, manifest = self.path(step), self._read(step)
        stamps = self._stamps(manifest)
        for name, expected in manifest.files.items():
            if damage := _damage(path / name, expected):
                raise UserError(f"{path}: the checkpoint is damaged, {name:.200} {damage}; use another one")
        self._hashed[step] = stamps
        return manifest

    def _readable(self) -> Iterator[Manifest]:
        """Manifests that can be read, newest step first."""
        for step in self._steps():
            try:
                yield self._read(step)
            except _OtherFormat:
                raise
            except UserError:
                continue

    def _read(self, step: int) -> Manifest:
        """The manifest of a step; UserError if it is missing, damaged, of another step or in another format."""
        path = self.path(step)
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path}: the checkpoint has no {MANIFEST}: it is being written, or its writer was killed; use another"
            )
        try:
            manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
        except _OtherFormat as error:
            raise _OtherFormat(f"{path}: its {MANIFEST} {error}") from None
        except (OSError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
            raise UserError(f"{path}: its {MANIFEST} is damaged ({why}); use another checkpoint") from error
        if manifest.step != step:
            raise UserError(f"{path}: its {MANIFEST} is of step {manifest.step}; use another checkpoint")
        return manifest

    def _steps(self) -> list[int]:
        """Steps that have a folder, newest first; ignores files, links and names that no run writes, such as
        `step_007`."""
        folders = [path for path in self._folder.glob(f"{PREFIX}*") if path.is_dir() and not path.is_symlink()]
        return sorted(
            (int(path.name.removeprefix(PREFIX)) for path in folders if _STEP.fullmatch(path.name)), reverse=True
        )

    def _remove(self, step: int) -> None:
        """Delete the step's folder, its manifest first. If a file or link has the folder's name, delete only this."""
        self._hashed.pop(step, None)
        path = self.path(step)
        if path.is_symlink() or path.is_file():
            path.unlink()
            return
        with suppress(FileNotFoundError, IsADirectoryError):
            (path / MANIFEST).unlink()
        shutil.rmtree(path, ignore_errors=True)

    def _is_whole(self, step: int) -> bool:
        with suppress(UserError):
            return bool(self.manifest(step))
        return False

    def _stamps(self, manifest: Manifest) -> _Stamps:
        """The size and time stamps of the files that exist."""
        files = [self.path(manifest.step) / name for name in manifest.files]
        return [(stat.st_size, stat.st_mtime_ns) for stat in (file.stat() for file in files if os.path.isfile(file))]


def disk_notes(folder: str | Path, checkpoint_bytes: float) -> Iterator[str]:
    """Notes on the disk of a run folder: too little room for the checkpoints, or a slow disk. The measured speed
    includes `fsync`."""
    needed = MIN_FREE_BYTES + 2 * checkpoint_bytes  # the newest one is kept until the next one is complete
    if (free := shutil.disk_usage(folder).free) < needed:
        yield f"has {free / 1e9:.0f} GB free on the disk of {folder}: give it {needed / 1e9:.0f}"
    began = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield f"cannot write {WRITTEN_BYTES >> 20} MiB into {folder}: {error.strerror}"
        return
    rate = WRITTEN_BYTES / (time.monotonic() - began)
    if (seconds := checkpoint_bytes / rate) > SLOW_SECONDS:
        yield (
            f"writes {rate / 1e6:.0f} MB/s to the disk of {folder}: a checkpoint of {checkpoint_bytes / 1e9:.0f} GB "
            f"takes {seconds / 60:.0f} minutes; choose another file system for run.dir"
        )


def _damage(file: Path, expected: FileChecksum) -> str | None:
    """How a file differs from its entry in the manifest; None if they match."""
    if not os.path.isfile(file):  # also if the name is not valid for files
        return "is missing"
    size = file.stat().st_size
    if size != expected.bytes:
        return f"has {size} bytes instead of {expected.bytes}"
    return "has other bytes than were written" if _checksum(file) != expected else None


def _checksum(file: Path) -> FileChecksum:
    hasher = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 22):
            hasher.update(chunk)
    return FileChecksum(bytes=file.stat().st_size, xxh3_64=hasher.hexdigest())
