"""Restores a run's folder from its object store, on a disk that has no data of the run.

The restored folder has the newest complete checkpoint and the journal that was uploaded with it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from service.errors import ConfigError, StoreFailed, UserError
from service.files import resolved, sync
from service.run.checkpoints import MANIFEST, FileChecksum
from service.run.folder import CHECKPOINTS, CONFIG, JOURNAL, is_run_folder, new_run_folder, runs_folder
from service.run.phases import SECONDS, phase, say
from service.run.preparing.resuming import Load
from service.store.manifest import Damaged, StoredCheckpoint, manifest_name, run_id, stored_steps
from service.store.objects import Objects, open_store

AT_ONCE = 8
"""Maximum number of files that are read from the store at the same time."""
READS = 3
"""Maximum attempts to read a file, because a transfer may change bytes."""


def from_store(url: str, load: Load, into: Path | None = None) -> Path:
    """Restore the folder of the run whose store is at the address `url`, and return the folder (see `fetched`)."""
    with phase(f"reading {url}", after=SECONDS):
        return fetched(open_store(url), load, say, into)


def fetched(objects: Objects, load: Load, say: Callable[[str], None], into: Path | None = None) -> Path:
    """Restore the folder of the run in a store, and return the folder: `into`, a folder without checkpoints; if `into`
    is None, a new folder in `run.dir`.

    Raises:
        UserError: the store cannot be read, or holds no complete checkpoint.
    """
    damaged = list[int]()
    try:
        for step in stored_steps(sizes := objects.sizes()):
            try:
                folder = _restored(objects, StoredCheckpoint.read(objects, step), sizes, load, say, into)
            except Damaged as error:
                say(f"the checkpoint of step {step} in {objects.url} is passed over: {error}")
                damaged.append(step)
            except StoreFailed:
                if manifest_name(step) in objects.sizes():  # otherwise a running process of the run has deleted it
                    raise
            else:
                objects.delete([manifest_name(passed_over) for passed_over in damaged])
                return folder
    except StoreFailed as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; the run's folder cannot be made") from None
    whole = f"no whole checkpoint (damaged: {damaged})" if damaged else "no checkpoint of a run"
    raise UserError(f"{objects.url} holds {whole}; begin a new run, or give the path of a run's folder")


def _restored(
    objects: Objects,
    manifest: StoredCheckpoint,
    sizes: dict[str, int],
    load: Load,
    say: Callable[[str], None],
    into: Path | None,
) -> Path:
    """Read all files into a folder. What makes the checkpoint count, and the folder a run's, is written last: a folder
    whose restoration was killed is restored again."""
    for path, file in manifest.files.items():
        if sizes.get(manifest.object_of(path)) != file.bytes:
            raise Damaged(f"{path} is missing, or has another size than was written")
    read = partial(_read, objects, manifest)
    folder = into or _new_folder(objects.url, read, load)
    megabytes = sum(file.bytes for file in manifest.files.values()) / 1e6
    say(f"reading step {manifest.step} from {objects.url}: {megabytes:.0f} MB")
    for name in (CHECKPOINTS, JOURNAL):
        shutil.rmtree(folder / name, ignore_errors=True)
    run_id(folder, manifest.run)
    last = (f"{CHECKPOINTS}/step_{manifest.step}/{MANIFEST}", CONFIG)
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(read, folder), manifest.files.keys() - last))
        for path in last:
            read(folder, path)
    finally:
        if not is_run_folder(folder):
            shutil.rmtree(folder)
    say(f"what the run did after the upload of step {manifest.step} is lost, and is generated again")
    return folder


def _new_folder(url: str, read: Callable[[Path, str], None], load: Load) -> Path:
    """A new folder in `run.dir`, by the stored configuration."""
    with tempfile.TemporaryDirectory() as temporary:
        read(Path(temporary), CONFIG)
        try:
            run = load(Path(temporary) / CONFIG).run
        except ConfigError as error:
            raise ConfigError(str(error).replace(temporary, url)) from None
    return new_run_folder(resolved(runs_folder(run.dir)), run.name)


def _read(objects: Objects, manifest: StoredCheckpoint, folder: Path, path: str) -> None:
    """Write one file of the manifest to a folder; raises `Damaged` if its object differs from the manifest."""
    name = manifest.object_of(path)
    if all(_copied(objects, name, folder / path) != manifest.files.get(path) for _ in range(READS)):
        raise Damaged(f"{name} has other bytes than were written")


def _copied(objects: Objects, name: str, file: Path) -> FileChecksum:
    """Copy an object to a file; returns the size and checksum of what was read."""
    size, hasher, is_private = 0, xxhash.xxh3_64(), file.parent.name == JOURNAL
    file.parent.mkdir(mode=0o700 if is_private else 0o777, parents=True, exist_ok=True)
    try:
        with open(file, "wb", opener=partial(os.open, mode=0o600 if is_private else 0o666)) as opened:
            for chunk in objects.get(name):
                hasher.update(chunk)
                size += opened.write(chunk)
        sync(file)
    except OSError as error:  # an error of a full disk, which names no file
        raise OSError(error.errno, error.strerror, str(file)) from None
    return FileChecksum(bytes=size, xxh3_64=hasher.hexdigest())
