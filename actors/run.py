"""One run from its configuration to its summary: prepare, place the actors, train, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from pathlib import Path

from actors.authentication import refuse_open_ray
from actors.cluster import place_actors, ray_session
from actors.coordinator import Coordinator
from service.checkpoints import Checkpoints, Manifest
from service.config import Config, check
from service.errors import RunFailed, UserError
from service.prepare import prepare
from service.runfolder import RunFolder, new_run_folder

IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the entry point of a job."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: Config, resume: Path | None = None) -> int:
    """Run to the end, to a stop signal or to a failure; returns the exit code.

    `resume` is the folder of a run that goes on from its newest checkpoint. A stop signal writes the final weights and
    returns 128 + its number.

    Raises:
        UserError: the configuration or a file that it names is wrong.
        RunFailed: progress is impossible.
    """
    check(config)
    refuse_open_ray(os.environ, config.run.insecure_local)
    path = resume or new_run_folder(runs_folder(config), config.run.name)
    say(f"run folder: {path}")
    folder = RunFolder(path)
    with folder.locked():
        manifest = None if resume is None else newest_checkpoint(config, path)
        folder.write_config(config)
        prepared = prepare(config, path)
        mark = uuid.uuid4().hex[:12]
        say("starting Ray ...")
        try:
            with ray_session(config, mark, path / "logs"):
                cluster = place_actors(config, prepared, path / "journal")
                coordinator = Coordinator(config, cluster, folder, prepared, say, manifest)
                return asyncio.run(_until_stopped(coordinator))
        except OSError as error:
            raise RunFailed(f"{error.filename or path}: {error.strerror or error}") from error


def newest_checkpoint(config: Config, path: Path) -> Manifest:
    """The checkpoint that a run goes on from.

    Raises:
        UserError: there is none, or the run has nothing left to do.
    """
    manifest = Checkpoints(path / "checkpoints", config.trainer.keep_checkpoints).newest()
    if manifest is None:
        raise UserError(f"{path}: no whole checkpoint to resume from (was trainer.checkpoint_every 0?)")
    if manifest.step >= config.run.max_steps:
        raise UserError(f"{path}: the run has all of its {manifest.step} steps; raise run.max_steps to go on")
    return manifest


def runs_folder(config: Config) -> Path:
    """Where run folders go; a Ray job works in a temporary copy, so there a relative path starts at home."""
    return Path.home() / config.run.dir if IN_RAY_JOB in os.environ else config.run.dir


async def _until_stopped(coordinator: Coordinator) -> int:
    """Run the coordinator; the first stop signal ends it in order."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, coordinator.stop, number)
    await coordinator.run()
    for number in STOP_SIGNALS:
        # What follows ends by itself within seconds; a second signal would only cut it short.
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    return 128 + coordinator.stopped_by if coordinator.stopped_by else 0


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True, file=sys.stdout)
