"""`baton submit`: a run as a Ray job, with the retries and settings that `ray job submit` leaves to its user."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from actors.authentication import keep_token_private, refuse_open_ray
from service.config import Config
from service.errors import UserError

START_SECONDS = 60.0
"""Ray refuses jobs for some seconds after its head has started; this long one tries again."""

RETRY_SECONDS = 1.0

STARTING = ("No available agent", "Failed to connect to Ray")

LEFT_OUT = [".git", ".venv", "runs", "build", "dist", "tests", "benchmarks", "docs", "**/__pycache__"]
"""What of the working directory the job does not need."""


def submit_run(
    config: Config, files: Sequence[Path], overrides: Sequence[str], address: str | None, follow: bool
) -> int:
    """Submit `baton run` with these files and settings from the current folder; returns the exit code.

    Raises:
        UserError: a file lies outside the folder, or the cluster refuses the job or everybody may command it.
    """
    refuse_open_ray(os.environ, config.run.insecure_local)
    keep_token_private({**os.environ, "RAY_ADDRESS": "of a cluster"}, Path.home())
    return submit(entrypoint(files, overrides, Path.cwd()), address, follow)


def entrypoint(files: Sequence[Path], overrides: Sequence[str], folder: Path) -> str:
    """The command of the job, which runs in a copy of `folder`.

    >>> entrypoint([Path("configs/quickstart.yaml")], ["run.seed=1"], Path.cwd())
    'python -m service run --config configs/quickstart.yaml run.seed=1'

    Raises:
        UserError: a file lies outside the folder, so the job would not have it.
    """
    words = ["python", "-m", "service", "run"]
    for file in files:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise UserError(f"{file}: not inside {folder}, which is what the job gets a copy of")
        words += ["--config", str(path.relative_to(folder.resolve()))]
    return shlex.join([*words, *overrides])


def submit(
    command: str, address: str | None, follow: bool, connect: Callable[[str | None], Any] = JobSubmissionClient
) -> int:
    """Submit the command; follow its output to the end, unless told not to. Returns the exit code.

    Raises:
        UserError: no cluster answers at the address, or it refuses the job.
    """
    client, job = _submitted(command, address, connect)
    print(f"submitted {job}; stop it with: ray job stop {job}", flush=True)
    if not follow:
        return 0
    asyncio.run(_follow(client, job))
    status = client.get_job_status(job)
    print(f"{job}: {status}", flush=True)
    return 0 if status == JobStatus.SUCCEEDED else 1


def _submitted(command: str, address: str | None, connect: Callable[[str | None], Any]) -> tuple[Any, str]:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            client = connect(address)
            return client, client.submit_job(entrypoint=command, runtime_env={"working_dir": ".", "excludes": LEFT_OUT})
        except (ConnectionError, RuntimeError) as error:
            starting = any(sign in str(error) for sign in STARTING)
            if not starting or time.monotonic() > deadline:
                reason = str(error).strip().splitlines()[0]
                raise UserError(f"--address: the cluster at {address or 'the default address'}: {reason}") from None
            time.sleep(RETRY_SECONDS)


async def _follow(client: Any, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
