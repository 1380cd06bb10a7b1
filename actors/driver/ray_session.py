"""Starts Ray for one run or evaluation, or connects to a Ray cluster. All processes of the run end together with this
process."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import services, worker
from ray.job_config import JobConfig

from actors import RAY_ENV
from actors.calls import in_a_line
from actors.driver.signals import handlers_kept, run_beside, when_stuck
from actors.engine.vllm_arguments import SCRATCH
from actors.observe.actor_logs import log_env
from actors.watchdog import IN_ORDER, MARK, NEEDED, end_processes, start_watchdog
from service.config import Config
from service.environment_variables import SAFE_PATH, USER_FOLDER
from service.errors import RunFailed, UserError
from service.run.phases import say
from service.user_code import user_folder

CONNECT_SECONDS = 10.0
"""Seconds in which the head of a cluster must accept a connection."""
START_TRIES = 3
"""Maximum number of tries to start Ray. Ray's raylet ends if one of its agents is not up within 15 s; no setting
changes this limit (https://github.com/ray-project/ray/issues/65983). On a busy machine the next try is faster, because
the files are cached."""
LOOK_SECONDS, SILENT_SECONDS = 0.2, 40.0
"""Seconds between two checks of Ray; and seconds without its control store after which Ray counts as ended. (The store
may start again. Ray itself waits for 60.)"""
RAYLET_ERRORS = "raylet.err"
PASSED_ON = re.compile("(TORCH_)?NCCL_|UCX_|FI_|GLOO_|VLLM_")

_CHECK_FAILED = re.compile(r"Check failed: .*")

TOKEN_HINT = "if the address is right, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must have the cluster's token"
"""Hint for a cluster that accepts connections but does not answer: its token is probably missing."""


@contextmanager
def ray_session(
    config: Config,
    mark: str,
    logs: Path | None = None,
    stopped: Callable[[], None] = lambda: None,
    failed: Callable[[str], None] = say,
    summary: Path | None = None,
) -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names, or start a local Ray and shut it down afterwards.

    Actors write their logs into `logs`. Every process of the run has `mark` in its environment: by this the watchdog
    finds and ends them when this process dies. If a stop signal comes while this process is stuck in Ray's start,
    `stopped` is called before the process ends. If Ray has ended, `failed` is called with the reason, and the process
    ends. If Ray itself ends the process first, the watchdog writes the file `summary`.

    Raises:
        UserError: no cluster answers at the address.
        RunFailed: Ray has not started; the message says why.
    """
    os.environ[MARK] = mark

    def end(number: int) -> None:
        stopped()
        os._exit(128 + number)

    try:
        with handlers_kept(), when_stuck(end):
            _connect(config, mark, logs, summary)
    except Exception as error:
        if not _is_failed_start(error):
            raise
        if address := os.environ.get("RAY_ADDRESS"):
            raise UserError(f"RAY_ADDRESS={address}: {in_a_line(error)}; {TOKEN_HINT}") from error
        raise RunFailed(f"Ray did not start: {in_a_line(error)}") from error
    over = threading.Event()
    threading.Thread(target=_watch, args=(over, failed), name="ray", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if folder := os.environ.get(SCRATCH):
            with suppress(OSError):  # the folder was removed, or its disk is full
                Path(folder, IN_ORDER).touch()
        run_beside(ray.shutdown)


def _watch(over: threading.Event, failed: Callable[[str], None]) -> None:
    """Watch Ray until `over` is set. If Ray has ended, call `failed` with the reason and end this process. (No actor
    could start again, and calls of Ray would block until Ray ends this process without a reason.)"""
    silent, node = 0.0, worker._global_node
    while not over.wait(LOOK_SECONDS):
        ended = [f"Ray's {kind} has ended" for kind, _ in node.dead_processes() if kind in ("raylet", "gcs_server")]
        began = time.monotonic()
        try:
            check_address(node.gcs_address)
            silent = 0.0
        except UserError:
            # A process that was frozen counts only the usual time.
            silent += LOOK_SECONDS + min(time.monotonic() - began, CONNECT_SECONDS)
        if silent > SILENT_SECONDS:
            ended.append(f"Ray's control store at {node.gcs_address} has not answered for {silent:.0f} s")
        if ended and not over.is_set():
            try:
                failed(f"{ended[0]}{NEEDED}")
            finally:
                os._exit(RunFailed.exit_code)


class _BatonJob(JobConfig):  # type: ignore[misc]
    """A Ray job for which Ray does not put the driver's folder first in the workers' import path."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _connect(config: Config, mark: str, logs: Path | None, summary: Path | None) -> None:
    os.environ[SAFE_PATH] = "1"
    variables = passed_on(os.environ) | {MARK: mark, SAFE_PATH: "1", USER_FOLDER: str(user_folder())}
    settings = {
        "namespace": f"baton-{config.run.name}-{mark}",
        "job_config": _BatonJob(),
        "runtime_env": {"env_vars": variables | ({} if logs is None else log_env(logs))},
        "log_to_driver": False,
        "logging_level": "error",
    }
    if address := os.environ.get("RAY_ADDRESS"):
        check_address(address)
        os.environ.pop(SCRATCH, None)
        start_watchdog(mark)
        ray.init(**settings)
        return
    scorers = sum(each.cpus * each.n_processes for each in config.scorers.values())
    # with CUDA IPC the bundle of each rank holds an engine
    engines = config.trainer.ranks if config.weights.transport == "ipc" else config.generator.max_engines
    cpus = max(os.cpu_count() or 1, config.trainer.ranks + engines + math.ceil(scorers))
    folder = Path(tempfile.gettempdir(), f"baton-{mark}")
    os.environ[SCRATCH] = str(folder)
    start_watchdog(mark, folder, summary)  # first, so that a stop signal cannot leave the folder behind
    try:
        folder.mkdir(mode=0o700)
        _start(mark, folder / "r", logs, num_cpus=cpus, **settings)  # Ray opens its own folder to all; paths are short
    except OSError as error:
        why = f"Ray cannot keep its files in {folder.parent}: {error}"
        raise UserError(f"TMPDIR: {why}; name another folder, with room and a short path") from error


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of communication libraries and vLLM that the user has set. (A cluster's
    processes inherit only the variables of their node.) Logs only their names, because values may be secret."""
    found = {name: value for name, value in environment.items() if PASSED_ON.match(name) and name not in RAY_ENV}
    if found:
        say(f"environment variables for ranks and engines: {', '.join(sorted(found))}")
    return found


def check_address(address: str) -> None:
    """Raises `UserError` if nothing listens at the address (host:port). Ray would retry for ever, and ignore stop
    signals."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"{address}: no Ray cluster answers there ({error}); start one, or correct the address (RAY_ADDRESS, or "
            "--address)"
        ) from error


def _start(mark: str, folder: Path, logs: Path | None, **settings: Any) -> None:
    """Start a Ray on this machine that keeps its files in `folder`. If a raylet ended, copy its error log to `logs`."""
    for number in range(1, START_TRIES + 1):
        try:
            with _process_groups_of_their_own():
                ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), **settings)
            return
        except Exception as error:
            if not _is_failed_start(error):
                raise
            reason = f"Ray did not start: {in_a_line(error)}{_why(folder, logs)}"
            if number == START_TRIES:
                raise RunFailed(reason) from error
        say(f"{reason}; starting it again, try {number + 1} of {START_TRIES} ...")
        end_processes(mark, set())


@contextmanager
def _process_groups_of_their_own() -> Iterator[None]:
    """Within the block, Ray's processes start in their own process groups. Otherwise a stop signal to this process's
    group, as `timeout` and service managers send it, would end Ray before this process has stopped the run."""
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _is_failed_start(error: Exception) -> bool:
    """Whether `ray.init` failed for Ray's own reasons; Ray raises a bare Exception if it is not up in time."""
    return isinstance(error, RuntimeError | ConnectionError) or type(error) is Exception


def _why(folder: Path, logs: Path | None) -> str:
    """Return a clause that names the check which ended the raylet. Copy the raylet's error log to `logs`."""
    file = folder / "session_latest" / "logs" / RAYLET_ERRORS
    if not file.is_file() or not (found := _CHECK_FAILED.search(file.read_text(errors="replace"))):
        return ""
    if logs is not None:
        shutil.copyfile(file, logs / RAYLET_ERRORS)
    return f" Its raylet ended: {found[0]}" + ("" if logs is None else f" (more in {logs / RAYLET_ERRORS})")
