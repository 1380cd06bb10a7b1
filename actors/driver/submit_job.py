"""`baton submit`: runs `baton run` as a Ray job; waits while the cluster starts, and follows the job's output."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import ray.exceptions
from ray.job_submission import JobStatus, JobSubmissionClient

from service.backoff import Backoff, retried
from service.errors import RunFailed, UserError, printable
from service.run.phases import phase, say

START_SECONDS = 60.0
"""Seconds in which a submission is retried: Ray refuses jobs for some seconds after its head has started."""
RETRY = Backoff(1.0, 1.0)
NO_AGENT = "No available agent"
STARTING = (NO_AGENT, "Failed to connect to Ray")
REFUSALS = (OSError, RuntimeError, ValueError, ray.exceptions.RayError, aiohttp.ClientError)
"""Errors of Ray's client for a wrong address, a wrong token, and a cluster that refuses."""
ADDRESS = "RAY_API_SERVER_ADDRESS"
LEFT_OUT = [".git", ".venv", "runs", "build", "dist", "tests", "benchmarks", "docs", "**/__pycache__"]
"""Parts of the current folder that the job does not need."""


def entrypoint(files: Sequence[Path], overrides: Sequence[str], folder: Path) -> str:
    """The command of the job, which runs in a copy of `folder`.

    >>> entrypoint([Path("mine.yaml")], ["run.seed=1"], Path("/srv/my-task"))
    'cd "${PYTHONPATH%%:*}"/my-task && exec baton run --config mine.yaml run.seed=1'

    Raises:
        UserError: a file lies outside the folder.
    """
    words, folder = ["baton", "run"], folder.resolve()
    for file in files:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder):
            raise UserError(f"{file}: not inside {folder}, the folder that is copied for the job; move the file there")
        words += ["--config", str(path.relative_to(folder))]
    return f'cd "${{PYTHONPATH%%:*}}"/{shlex.quote(folder.name)} && exec {shlex.join([*words, *overrides])}'


def submit(
    command: str, address: str | None, follow: bool, connect: Callable[[str | None], Any] = JobSubmissionClient
) -> int:
    """Submit the command and, if asked to, print its output to the end. Returns the exit code.

    Raises:
        UserError: no cluster answers at the address, or it refuses the job.
        RunFailed: the cluster stopped answering.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)  # Ray logs the files that it packs; errors are raised
    if address is not None:
        os.environ[ADDRESS] = address  # Ray would prefer the address in the environment
    client, job = asyncio.run(_submitted(command, address, connect))
    to_job = f"--address {address} {job}" if address else job
    say(f"submitted {job}; stop it with: ray job stop {to_job}")
    if not follow:
        return 0

    async def follow_output() -> None:
        async for text in client.tail_job_logs(job):
            print(printable(text), end="", flush=True)

    try:
        asyncio.run(follow_output())
        status = client.get_job_status(job)
    except KeyboardInterrupt:
        say(f"{job} goes on; show its output with: ray job logs --follow {to_job}")
        return 130
    except REFUSALS as error:
        raise RunFailed(f"the cluster stopped answering ({_reason(error)}); {job} may still run") from error
    say(f"{job}: {status}")
    return 0 if status == JobStatus.SUCCEEDED else 1


async def _submitted(command: str, address: str | None, connect: Callable[[str | None], Any]) -> tuple[Any, str]:
    where = address or os.environ.get(ADDRESS) or os.environ.get("RAY_ADDRESS") or "the default address"
    refused = ""

    async def ask() -> tuple[Any, str]:
        client = connect(address)
        # If the copy were the working directory, it would be first on Python's path, before the standard library.
        # As a module, only the folder that contains the copy is on the path.
        environment = {"py_modules": [str(Path.cwd())], "excludes": LEFT_OUT}
        return client, client.submit_job(entrypoint=command, runtime_env=environment)

    def failed(error: Exception) -> None:
        nonlocal refused
        if not any(sign in str(error) for sign in STARTING):
            raise error
        refused = f"the cluster, which may still be starting: {_reason(error)}"

    with phase(f"submitting the job to the cluster at {where}", left=lambda: refused):
        try:
            return await retried(ask, REFUSALS, RETRY, within=START_SECONDS, failed=failed)
        except REFUSALS as error:
            raise UserError(f"--address: the cluster at {where}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    """Return the error in one line, with advice."""
    if isinstance(error, ray.exceptions.AuthenticationError):
        why = "there is no token" if "couldn't find" in str(error) else "the cluster refuses the token"
        return f"{why}; ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN must hold the cluster's"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if NO_AGENT in first:
        return f"{first}; if another Ray runs there: ray start --head --dashboard-agent-listen-port=52366"
    if isinstance(error, ValueError | ray.exceptions.RpcError):
        return f"{first} (a dashboard's address is of the form http://HOST:8265)"
    return first
