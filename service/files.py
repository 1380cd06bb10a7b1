"""Folders that appear whole: made beside their place, then renamed into it.

final               whole, unless the process died between two renames
.final.making       being written; rubbish once its writer is gone
.final.earlier      what was there before; the whole one as long as there is no `final`
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from service.errors import UserError

LOCK = ".lock"
LOCK_SECONDS = 1.0
"""How long a run tries to hold its folder: who asks whether it is held holds it for an instant."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run folder for one process.

    Raises:
        UserError: another one holds it.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    with (folder / LOCK).open("w") as lock:
        while not _locked(lock, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise UserError(f"{folder}: a run is going on in this folder; stop it first")
            time.sleep(0.02)
        yield


def is_held(folder: Path) -> bool:
    """Whether a process of this machine runs in a run folder."""
    try:
        with (folder / LOCK).open() as lock:
            return not _locked(lock, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _locked(lock: TextIO, how: int) -> bool:
    """Locks an open file until it is closed; False: somebody else has."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends well; if not, nothing of it is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    restore(folder)
    making, earlier = _making(folder), earlier_of(folder)
    try:
        making.mkdir()
        yield making
        sync(making)
        sync(folder.parent)
        if folder.exists():
            os.replace(folder, earlier)
        os.replace(making, folder)
    except BaseException:
        restore(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def restore(folder: Path) -> None:
    """Bring back what was there before a writer that died between two renames, and remove what any dead one left."""
    if not folder.exists() and earlier_of(folder).exists():
        os.replace(earlier_of(folder), folder)
    for left in (_making(folder), earlier_of(folder)):
        shutil.rmtree(left, ignore_errors=True)


def earlier_of(folder: Path) -> Path:
    """Where the folder is that is being replaced."""
    return folder.with_name(f".{folder.name}.earlier")


def _making(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.making")


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
