"""One run from its configuration to its summary: prepare, place the actors, train, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from pathlib import Path

from actors.cluster import place_actors, ray_session
from actors.coordinator import Coordinator
from service.config import Config, check
from service.errors import UserError
from service.prepare import prepare
from service.runfolder import RunFolder, new_run_folder

IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the entry point of a job."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: Config) -> int:
    """Run to the end, to a stop signal or to a failure; returns the exit code.

    A stop signal writes the final weights and returns 128 + its number.

    Raises:
        UserError: the configuration or a file that it names is wrong.
        RunFailed: progress is impossible.
    """
    check(config)
    path = new_run_folder(runs_folder(config), config.run.name)
    say(f"run folder: {path}")
    folder = RunFolder(path)
    folder.write_config(config)
    prepared = prepare(config, path)
    if len(prepared.tasks) == 0:
        raise UserError(f"{prepared.tasks_file}: no prompts")
    mark = uuid.uuid4().hex[:12]
    say("starting Ray ...")
    with ray_session(config, mark, path / "logs"):
        cluster = place_actors(config, prepared, path / "journal")
        coordinator = Coordinator(config, cluster, folder, prepared, say)
        return asyncio.run(_until_stopped(coordinator))


def runs_folder(config: Config) -> Path:
    """Where run folders go; a Ray job works in a temporary copy, so there a relative path starts at home."""
    return Path.home() / config.run.dir if IN_RAY_JOB in os.environ else config.run.dir


async def _until_stopped(coordinator: Coordinator) -> int:
    """Run the coordinator; the first stop signal ends it in order."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, coordinator.stop, number)
    await coordinator.run()
    return 128 + coordinator.stopped_by if coordinator.stopped_by else 0


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True, file=sys.stdout)
