"""Resumes a run: finds the checkpoint from which it continues, and compares its settings with those of the earlier
process.

Everything is checked before Ray starts, so a refusal comes early and leaves the run unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.config import Config, RunConfig, TrainerConfig, load
from service.config.source import read_sources
from service.errors import UserError
from service.files import recover_folder
from service.run.checkpoints import MANIFEST, Checkpoints, Manifest
from service.run.folder import (
    CHECKPOINTS,
    CONFIG,
    FINAL,
    JOURNAL,
    METRICS,
    STORE_MARK,
    SUMMARY,
    find_run,
    lock_run,
    no_such_run,
)

Load = Callable[[Path], Config]
"""A function that reads the configuration of a run; settings on the command line override the file."""
FromStore = Callable[[str, Load, Path | None], Path]
"""A function that restores a run folder from the store at an address. It writes to the given folder; None: to a new
folder in `run.dir`."""


def folder_to_resume(
    run: str, configs: Sequence[Path], overrides: Sequence[str], from_store: FromStore
) -> tuple[Path, list[str]]:
    """The folder of the run to resume, and the settings that override its configuration. `run`: its folder, its name,
    or its store's address. If this disk lacks its data, it is restored from the store that the address or the
    configuration names. `UserError` if there is no such run."""

    def loaded(*files: Path) -> Config:
        return load([*files, *configs], overrides).config

    if "://" in run:
        return from_store(run, loaded, None), [*overrides, f"run.store={run}"]
    folder = find_run(run)
    if folder is None and configs and (store := loaded().run.store) is not None:
        folder = from_store(store, loaded, None)
    elif folder is not None and _is_to_be_restored(folder) and (store := loaded(folder / CONFIG).run.store) is not None:
        with lock_run(folder):
            if _is_to_be_restored(folder):  # else another process has restored it meanwhile
                from_store(store, loaded, folder.resolve())
    if folder is None:
        raise no_such_run(run, besides="the address of a store, ")
    return folder.resolve(), [*overrides]


def _is_to_be_restored(folder: Path) -> bool:
    """Whether a run's folder must be restored from its store: it has no checkpoint and no journal, or an earlier
    restoration was killed before the checkpoint was complete (`service.store.fetch`)."""
    has_checkpoint = any((folder / CHECKPOINTS).glob(f"*/{MANIFEST}"))
    has_journal = any((folder / JOURNAL).glob("*"))
    return not has_checkpoint and (not has_journal or (folder / STORE_MARK).exists())


@contextmanager
def resumed(run: RunConfig, trainer: TrainerConfig, path: Path) -> Iterator[Manifest]:
    """Within the block, hold the lock of a run's folder; delete unfinished checkpoints first. Yields the manifest of
    the checkpoint from which the run continues. (A run that has taken all its steps continues only to write its final
    weights.)

    Raises:
        UserError: another process runs this run, there is no complete checkpoint, or the run has nothing left to do.
    """
    with lock_run(path):
        checkpoints = Checkpoints(path / CHECKPOINTS, trainer.keep_checkpoints)
        manifest = checkpoints.newest()
        if manifest is None:
            raise UserError(f"{path}: {_why_none(path, trainer, checkpoints)}; begin a new run")
        left = run.max_steps - manifest.step
        if left < 0 or (left == 0 and _is_finished(path)):
            done = f"the run has all of its {manifest.step} steps"
            raise UserError(f"{path}: {done}; raise run.max_steps (it is {run.max_steps}) to continue")
        checkpoints.drop_unfinished()
        recover_folder(path / FINAL)
        yield manifest


def changed_settings(config: Config, folder: Path) -> list[str]:
    """One line for each setting that differs from the configuration with which the run was last started or resumed."""
    was, now = _leaves(read_sources([folder / CONFIG], ()).values), _leaves(config.model_dump(mode="json"))
    different = [setting for setting in {**now, **was} if was.get(setting) != now.get(setting)]
    return [f"{setting}: it is {now.get(setting)} from here on, and was {was.get(setting)}" for setting in different]


def _leaves(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """All settings by full path, without sections."""
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _is_finished(path: Path) -> bool:
    """Whether a run has taken all its steps and written its final weights, according to its summary."""
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the summary is missing or truncated: the final weights are written again
        return False
    return isinstance(summary, dict) and summary.get("state") == "finished"


def _why_none(path: Path, trainer: TrainerConfig, checkpoints: Checkpoints) -> str:
    if (path / METRICS).is_file() and '"sft/loss"' in (path / METRICS).read_text(encoding="utf-8", errors="replace"):
        return "a training by baton sft is not resumed: its models in checkpoints/ are for model.path"
    if damaged := checkpoints.steps():
        return f"every checkpoint is damaged (of step {', '.join(map(str, damaged))})"
    if not trainer.checkpoint_every:
        return "there is no checkpoint to resume from, because trainer.checkpoint_every is 0"
    return "there is no checkpoint to resume from: the run ended before its first one was written"
