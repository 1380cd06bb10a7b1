"""`baton run`: prepares data and model, starts Ray and the actors, and trains to the end or to a stop signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from actors.driver.authentication import keep_token_private, refuse_open_ray
from actors.driver.cluster import place_actors, ray_session
from actors.driver.coordinator import Coordinator
from actors.driver.signals import exit_on_stop_signals, force_after, on_stop_signal
from actors.observe.logs import begin_logs
from service.cli.phases import phase, say
from service.config import Config, check
from service.config.paths import with_absolute_paths
from service.errors import BatonError, RunFailed, UserError
from service.files import recover_folder
from service.observe.progress import end_early
from service.run.checkpoints import Checkpoints, Manifest
from service.run.folder import CHECKPOINTS, DRIVER_LOG, FINAL, JOURNAL, LOGS, SUMMARY, lock_run, new_run_folder
from service.run.log_file import log_into
from service.run.prepare import Prepared, prepare
from service.run.writer import RunWriter

IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the entry point of a Ray job."""


def run(config: Config, resume: Path | None = None) -> int:
    """Run to the end, to a stop signal or to a failure; returns the exit code.

    `resume` is the folder of a run to continue from its newest checkpoint. A stop signal writes the final weights and
    returns 128 + its number.

    Raises:
        UserError: the configuration or a file that it names is wrong.
        RunFailed: progress is impossible.
    """
    check(config)
    refuse_open_ray(os.environ, config.run.insecure_local)
    keep_token_private(os.environ, Path.home())
    path = resume or new_run_folder(runs_folder(config), config.run.name)
    folder = RunWriter(path)
    with lock_run(path):
        manifest = None if resume is None else newest_checkpoint(config, path)
        try:
            with exit_on_stop_signals(), log_into(folder.path / LOGS / DRIVER_LOG):
                return _run(config, folder, manifest)
        except SystemExit as stopped:
            end_early(folder, say, 0 if manifest is None else manifest.step)
            return int(stopped.code or 0)
        except (BatonError, OSError) as error:
            failure = (
                error
                if isinstance(error, BatonError)
                else RunFailed(f"{error.filename or path}: {error.strerror or error}")
            )
            if not path.is_dir() and not isinstance(error, UserError):  # the folder of refused input is deleted
                failure = RunFailed(f"{path}: the folder was renamed or deleted while its run went on")
            with contextlib.suppress(OSError):  # the disk may be what failed
                folder.write_summary({"state": "failed", "reason": str(failure), "exit_code": failure.exit_code})
            raise failure from error
        finally:
            folder.delete_targets()


def _run(config: Config, folder: RunWriter, manifest: Manifest | None) -> int:
    """Prepare and train; if the data or the model is refused, the folder of a new run is deleted."""
    is_new = manifest is None
    with phase("preparing the data and the model"):
        try:
            prepared = prepare(with_absolute_paths(config), folder.path)
        except UserError:
            if is_new:
                shutil.rmtree(folder.path)
            raise
    folder.delete_end()
    if is_new:
        folder.write_config(config)
    say(f"run folder: {folder.path}")
    return _run_on_ray(config, folder, prepared, manifest)


def _run_on_ray(config: Config, folder: RunWriter, prepared: Prepared, manifest: Manifest | None) -> int:
    mark = uuid.uuid4().hex[:12]
    address = os.environ.get("RAY_ADDRESS")
    stopped_early = partial(end_early, folder, say, 0 if manifest is None else manifest.step)
    begin_logs(config, folder.path / LOGS)
    with contextlib.ExitStack() as held:
        seconds = config.run.stop_grace
        countdown = held.enter_context(force_after(seconds, partial(end_by_force, folder, seconds)))
        with phase(f"connecting to the Ray cluster at {address}" if address else "starting Ray"):
            held.enter_context(ray_session(config, mark, folder.path / LOGS, stopped_early))
        cluster = place_actors(with_absolute_paths(config), prepared, folder.path / JOURNAL)
        coordinator = Coordinator(config, cluster, folder, prepared, say, manifest)
        return asyncio.run(_until_stopped(coordinator, countdown))


def newest_checkpoint(config: Config, path: Path) -> Manifest:
    """The checkpoint from which a run resumes; files that a killed writer left unfinished are deleted.

    Raises:
        UserError: there is no whole checkpoint, or the run has taken all its steps.
    """
    checkpoints = Checkpoints(path / CHECKPOINTS, config.trainer.keep_checkpoints)
    checkpoints.drop_unfinished()
    recover_folder(path / FINAL)
    manifest = checkpoints.newest()
    if manifest is None:
        raise UserError(f"{path}: no whole checkpoint to resume from (was trainer.checkpoint_every 0?)")
    if manifest.step >= config.run.max_steps:
        raise UserError(f"{path}: the run has all of its {manifest.step} steps; raise run.max_steps to continue")
    return manifest


def runs_folder(config: Config) -> Path:
    """The folder of run folders. A Ray job works in a temporary copy, so there a relative path starts at home."""
    return Path.home() / config.run.dir if IN_RAY_JOB in os.environ else config.run.dir


async def _until_stopped(coordinator: Coordinator, countdown: Callable[[int], None]) -> int:
    """Run the coordinator; the first stop signal ends it in order, within the time of the countdown."""

    def stop(number: int) -> None:
        countdown(number)
        coordinator.stop(number)

    with on_stop_signal(stop):
        await coordinator.run()
    return 128 + coordinator.stopped_by if coordinator.stopped_by else 0


def end_by_force(folder: RunWriter, seconds: float, number: int) -> None:
    """End this process now; the watchdog ends the others."""
    reason = f"ended by force: {seconds:g} s after the stop signal (run.stop_grace) the run had not ended in order"
    try:
        if not (folder.path / SUMMARY).exists():
            folder.write_summary({"state": "stopped", "steps": folder.step, "reason": reason})
        say(reason)
    finally:  # the disk may be full, and the terminal closed
        os._exit(128 + number)
