"""Restores a run's folder from its object store, on a disk that has no data of the run.

The restored folder has the state of the newest checkpoint: its journal ends at the checkpoint, and the run repeats the
steps after it. The run then continues as after any other stop.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import xxhash

from service.errors import ConfigError, StoreFailed, UserError
from service.files import LOCK, lock_folder, resolved, sync
from service.run.checkpoints import Checkpoints
from service.run.folder import CHECKPOINTS, CONFIG, JOURNAL, STORE_MARK, new_run_folder, runs_folder
from service.run.phases import SECONDS, phase, say
from service.run.resuming import Load
from service.store.contents import (
    RUN,
    Damaged,
    FolderMark,
    ReachedStep,
    RunMark,
    StoredCheckpoint,
    StoredFile,
    manifest_name,
    stored_steps,
)
from service.store.objects import Objects, open_store

AT_ONCE = 8
"""Maximum number of files that are read from the store at the same time."""
READS = 3
"""Maximum attempts to read a file whose bytes differ from those that were written. A new attempt helps if the error
came from the transfer."""


def from_store(url: str, load: Load, into: Path | None = None) -> Path:
    """Restore the folder of the run whose store is at the address `url`, and return the folder (see `fetched`)."""
    with phase(f"reading {url}", after=SECONDS):
        return fetched(open_store(url), load, say, into)


def fetched(objects: Objects, load: Load, say: Callable[[str], None], into: Path | None = None) -> Path:
    """Restore the folder of the run in a store, and return the folder: `into`, a folder without checkpoints; if `into`
    is None, a new folder in `run.dir`, or a folder of the run that is already there and as new as the store.

    Raises:
        UserError: the store cannot be read, or holds no run or no complete checkpoint.
    """
    wrong = dict[int, str]()
    try:
        sizes = objects.sizes()
        mark = RunMark.read(objects, sizes) if RUN in sizes else None
        if mark is None:
            is_folder = objects.url.startswith("file:") and CONFIG in sizes
            remedy = "it is a run's folder: give its path" if is_folder else f"look for {CHECKPOINTS}/ in the store"
            raise UserError(f"{objects.url} holds no run; {remedy}")
        while left := [step for step in stored_steps(sizes) if step not in wrong]:
            try:
                return _fetched_step(objects, mark, sizes, left[0], load, say, into)
            except Damaged as error:
                say(f"the checkpoint of step {left[0]} in {objects.url} is passed over: {error}")
                wrong[left[0]] = f"step {left[0]}: {error}"
            except StoreFailed:
                sizes = objects.sizes()
                if manifest_name(left[0]) in sizes:  # otherwise another process that resumed the run has deleted it
                    raise
    except StoreFailed as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; the run's folder cannot be made from {objects.url}"
        ) from None
    if wrong:
        raise UserError(f"{objects.url}: every checkpoint is damaged ({'; '.join(wrong.values())}); begin a new run")
    raise UserError(f"{objects.url} holds no whole checkpoint: the run ended before its first one; begin a new run")


def _fetched_step(
    objects: Objects, mark: RunMark, sizes: dict[str, int], step: int, load: Load, say: Callable[[str], None],
    into: Path | None,
) -> Path:  # fmt: skip
    manifest = StoredCheckpoint.read(objects, step, mark.run, sizes)
    if CONFIG not in manifest.files:
        raise Damaged(f"it has no {CONFIG}")
    with tempfile.TemporaryDirectory() as temporary:
        _read_file(objects, Path(temporary), (CONFIG, manifest.files[CONFIG]))
        try:
            config = load(Path(temporary) / CONFIG)
        except ConfigError as error:
            raise ConfigError(str(error).replace(temporary, objects.url)) from None
    parent = resolved(runs_folder(config.run.dir)) if into is None else into.parent
    with _partial_folder(parent, mark) as partial_folder:
        if into is None and (here := _as_new(parent, mark)) is not None:
            say(f"{here} is as new as {objects.url}: the run goes on there")
            return here
        files, megabytes = len(manifest.files), sum(file.bytes for file in manifest.files.values()) / 1e6
        say(f"reading the checkpoint of step {step} from {objects.url}: {files} files, {megabytes:.0f} MB")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(_read_file, objects, partial_folder), manifest.files.items()))
        lost = _lost(objects, sizes, manifest, say)
        FolderMark(run=mark.run, owners=(mark.owner,), lost=lost).write(partial_folder)
        folder = into or new_run_folder(parent, config.run.name)
        _move(partial_folder, folder)
    return folder


@contextmanager
def _partial_folder(parent: Path, mark: RunMark) -> Iterator[Path]:
    """An empty folder into which only this process restores the run; it is deleted afterwards.

    Raises:
        UserError: another process restores the run to the same place.
    """
    folder = parent / f".partial.{mark.run}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(folder, 0)
    except (TimeoutError, FileNotFoundError):  # the latter: the other process has just deleted the folder
        raise UserError(f"{parent}: another process restores this run there; wait until it has ended") from None
    with lock:
        try:
            for left in folder.iterdir():  # of a process that was killed
                if left.is_dir():
                    shutil.rmtree(left)
                elif left.name != LOCK:
                    left.unlink()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _read_file(objects: Objects, folder: Path, entry: tuple[str, StoredFile]) -> None:
    """Write one file of the manifest to a folder, and verify its checksum.

    Raises:
        Damaged: the file in the store differs from the manifest.
    """
    if all(_digest_of_copy(objects, folder, entry) != entry[1].xxh3_64 for _ in range(READS)):
        raise Damaged(f"{entry[1].object} has other bytes than were written")


def _digest_of_copy(objects: Objects, folder: Path, entry: tuple[str, StoredFile]) -> str:
    path, stored = entry
    file, hasher = folder / path, xxhash.xxh3_64()
    private = path.startswith(f"{JOURNAL}/")
    file.parent.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    try:
        with open(file, "wb", opener=partial(os.open, mode=0o600 if private else 0o666)) as opened:
            for chunk in objects.get(stored.object):
                hasher.update(chunk)
                opened.write(chunk)
        sync(file)
    except OSError as error:  # an error of a full disk, which names no file
        raise OSError(error.errno, error.strerror, str(file)) from None
    return hasher.hexdigest()


def _lost(
    objects: Objects, sizes: dict[str, int], manifest: StoredCheckpoint, say: Callable[[str], None]
) -> tuple[str, int] | None:
    """The run's progress after the checkpoint, as far as the store has a record of it; it counts as rolled back."""
    reached = ReachedStep.read(objects, sizes)
    if reached is None or reached.accepted_tokens <= manifest.accepted_tokens or reached.step < manifest.step:
        say(f"if the run did more after step {manifest.step}, the store has no count of it; it is generated again")
        return None
    steps, tokens = reached.step - manifest.step, reached.accepted_tokens - manifest.accepted_tokens
    say(
        f"the run had come to step {reached.step} at least: {steps} optimizer steps and {tokens} accepted tokens after "
        f"step {manifest.step} count as rolled back, and are generated again"
    )
    return reached.owner, tokens


def _as_new(parent: Path, mark: RunMark) -> Path | None:
    """A folder of the same run that is as new as the store: no other process has written to the store; or None."""
    for file in sorted(parent.glob(f"*/{STORE_MARK}")):
        try:
            own = FolderMark.read(file.parent)
        except UserError:  # the mark is damaged, or may be another run's
            continue
        is_as_new = own is not None and own.run == mark.run and mark.owner in own.owners
        is_as_new = is_as_new and (file.parent / CONFIG).is_file()  # moved last, see `_move`
        if is_as_new and Checkpoints(file.parent / CHECKPOINTS, keep=1).newest() is not None:
            return file.parent
    return None


def _move(source: Path, folder: Path) -> None:
    """Move the fetched files to a folder without a checkpoint, in an order that shows what a killed process left: a
    folder with a journal but no checkpoint, and the store's mark, is restored again; a new folder with a configuration
    counts as a run."""
    last = (JOURNAL, CHECKPOINTS, CONFIG)
    entries = [entry for entry in source.iterdir() if entry.name != LOCK]
    for entry in sorted(entries, key=lambda entry: last.index(entry.name) if entry.name in last else -1):
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(entry, target)
    sync(folder)
