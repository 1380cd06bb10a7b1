"""Locks folders, and writes files and folders atomically: under another name first, then renamed.

final               complete; missing if the process died between two renames
.partial.final      being written; to be deleted once its writer is gone
.previous.final     the folder that is being replaced; the complete one while there is no `final`
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import psutil

LOCK = ".lock"
LOCK_POLL_SECONDS = 0.02
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the number of bytes of memory that a container may use, or with a word if it has no limit."""


def matching(path: Path) -> list[Path]:
    """The file or folder with this path. If the path ends in a pattern, such as `train-*.parquet`: the files with
    matching names, sorted by name."""
    is_pattern = "*" in path.name and not path.exists()
    return sorted(path.parent.glob(path.name)) if is_pattern else [path]


def lock_folder(folder: Path, seconds: float) -> TextIO:
    """Lock a folder until the returned file is closed or the process dies; a TimeoutError if it takes too long."""
    deadline = time.monotonic() + seconds
    while True:
        lock = (folder / LOCK).open("w")
        if _try_lock(lock, fcntl.LOCK_EX) and _is_still(folder / LOCK, lock):
            return lock
        lock.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} is locked by another process")
        time.sleep(LOCK_POLL_SECONDS)


def is_locked(folder: Path) -> bool:
    """True if a process of this machine holds the lock of a folder; takes the lock for a moment to find out."""
    try:
        with (folder / LOCK).open() as lock:
            return not _try_lock(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _is_still(path: Path, lock: TextIO) -> bool:
    """Whether `path` is still the open file; not if the process that held the lock before has deleted the folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _try_lock(lock: TextIO, how: int) -> bool:
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path for the block to write to. Then the file replaces `path`; a failed block deletes it."""
    partial = path.with_name(f".partial.{os.getpid()}.{path.name}")  # some writers choose a format by the suffix
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    except BaseException:  # also on cancellation: no partial file remains
        partial.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, text: str) -> None:
    """Replace the content of a file by a text atomically."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def create_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, unless it exists; of several writers, the first one's text stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.link(partial, path)
    except FileExistsError:
        return
    finally:
        os.unlink(partial)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which the block fills; then it replaces `folder`, or is deleted if the block fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    recover_folder(folder)
    partial, previous = _partial_folder(folder), previous_folder(folder)
    try:
        partial.mkdir()
        yield partial
        sync(partial)
        sync(folder.parent)
        if folder.exists():
            os.replace(folder, previous)
        os.replace(partial, folder)
    except BaseException:  # also on cancellation: the old folder is restored
        recover_folder(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Repair a folder whose replacement was interrupted: restore the previous one, delete the incomplete new one."""
    if not folder.exists() and previous_folder(folder).exists():
        os.replace(previous_folder(folder), folder)
    for left in (_partial_folder(folder), previous_folder(folder)):
        shutil.rmtree(left, ignore_errors=True)


def previous_folder(folder: Path) -> Path:
    """The path to which a folder is moved while it is being replaced."""
    return folder.with_name(f".previous.{folder.name}")


def _partial_folder(folder: Path) -> Path:
    return folder.with_name(f".partial.{folder.name}")


def resolved(path: Path) -> Path:
    """The absolute path without links; unlike `Path.resolve`, it raises nothing for a link that leads to itself."""
    return Path(os.path.realpath(path))


def sync(path: Path) -> None:
    """Wait until a file's content, or the list of a folder's entries, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """Yield the path to which the block writes a user's file: for a link, a pipe or a device the path itself, because
    a new file would take its place; for any other file as `atomic_file`."""
    if is_written_through(path):
        yield path
    else:
        with atomic_file(path) as partial:
            yield partial


def is_written_through(file: Path) -> bool:
    """True if a file is a link, a pipe or a device: these are written to, and not replaced by a new file."""
    return file.is_symlink() or (file.exists() and not file.is_file())


def free_memory() -> int:
    """Bytes of memory that are free on this machine, or the memory limit of its container if that is lower."""
    texts = [file.read_text().strip() for file in LIMITS if file.exists()]
    return min([psutil.virtual_memory().available, *(int(text) for text in texts if text.isdecimal())])
