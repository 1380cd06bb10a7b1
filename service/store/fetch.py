"""Restores a run's folder from its object store, on a disk that has no data of the run.

The restored folder has the newest complete checkpoint and the journal that was uploaded with it.
"""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from service.errors import ConfigError, StoreFailed, UserError
from service.files import resolved, sync
from service.run.checkpoints import MANIFEST, Checkpoints
from service.run.folder import CHECKPOINTS, CONFIG, JOURNAL, is_run_folder, new_run_folder, runs_folder
from service.run.phases import phase, say
from service.run.preparing.resuming import Load
from service.store.objects import Objects, StoredManifest, manifest_name, run_id, stored_steps

AT_ONCE = 8
"""Maximum number of files that are read from the store at the same time."""


def from_store(url: str, load: Load, into: Path | None = None) -> Path:
    """Restore the folder of a run from the newest checkpoint in its store; returns the folder. `into`: the folder to
    fill, which has no checkpoints; None: a new folder in `run.dir`.

    Raises:
        UserError: the store cannot be read, holds no checkpoint, or its newest checkpoint is damaged.
    """
    try:
        objects = Objects(url)
        if not (steps := stored_steps(names := objects.names())):
            raise UserError(f"{url} holds no checkpoint of a run; begin a new run, or give the path of a run's folder")
        with phase(f"reading step {steps[0]} from {url}"):
            folder = _restored(objects, steps[0], names, load, into)
    except StoreFailed as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"the run's folder cannot be made: {error}") from None
    say(f"what the run did after the upload of step {steps[0]} is lost, and is generated again")
    return folder


def _restored(objects: Objects, step: int, names: list[str], load: Load, into: Path | None) -> Path:
    """Read all files into a folder, last the manifest of the checkpoint and the run's configuration. Without these two
    files the folder counts as not restored, so a restoration that was killed can begin again."""
    manifest = StoredManifest.read(objects, step)
    prefix, checkpoint = f"step_{step}/{manifest.upload}/", f"{CHECKPOINTS}/step_{step}/{MANIFEST}"
    read = partial(_read, objects, prefix)
    folder = into or _new_folder(objects.url, read, load)
    try:
        for name in (CHECKPOINTS, JOURNAL):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / JOURNAL).mkdir(mode=0o700)
        run_id(folder, manifest.run)
        files = {name.removeprefix(prefix) for name in names if name.startswith(prefix)} - {checkpoint, CONFIG}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(partial(read, folder), files))
        read(folder, checkpoint)
        Checkpoints(folder / CHECKPOINTS, keep=1).manifest(step)
        read(folder, CONFIG)
    except UserError as error:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        earlier = f"to go on from an earlier checkpoint, delete {manifest_name(step)} in {objects.url}"
        raise UserError(f"{error}; {earlier}") from None
    finally:
        if not is_run_folder(folder):
            shutil.rmtree(folder)
    return folder


def _new_folder(url: str, read: partial[None], load: Load) -> Path:
    """A new folder in the folder that `run.dir` of the stored configuration names."""
    with tempfile.TemporaryDirectory() as temporary:
        read(Path(temporary), CONFIG)
        try:
            run = load(Path(temporary) / CONFIG).run
        except ConfigError as error:
            raise ConfigError(str(error).replace(temporary, url)) from None
    return new_run_folder(resolved(runs_folder(run.dir)), run.name)


def _read(objects: Objects, prefix: str, folder: Path, path: str) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as opened:
        opened.writelines(objects.get(prefix + path))
    sync(file)
