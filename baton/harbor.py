"""Plays Harbor's tasks: each trajectory is one trial of `harbor serve`. The trial's agent calls the policy.

    data: {train: tasks}                                         a folder of Harbor's task folders
    env: {name: harbor, options: {agent: terminus-2, environment: podman}}

play --POST /jobs/submit--> harbor serve --> container and agent --HTTP--> the session's address
     <--GET /rollouts-- rewards of Harbor's verifier, or why the trial failed
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import aiohttp
import yaml

from service.backoff import Backoff, retried
from service.errors import UserError
from service.rollout.environment import AgentSession, Task

log = logging.getLogger(__name__)

MADE = ".venv-harbor/bin/harbor"  # by `make harbor`
FOLDER = "task_folder"
"""Column of a row with the path of its task."""
PASSED = re.compile("HOME|LANG|TMPDIR|XDG_RUNTIME_DIR|(DOCKER|CONTAINERS?)_.*")
"""Environment variables of this process that a server gets. (It gets few, because tasks can read its variables.)"""
POLL_SECONDS, ANSWER_SECONDS, OUTAGE_SECONDS, START_SECONDS = 1.0, 60.0, 60.0, 120.0
"""Seconds between two requests about a trial; for one answer; until a silent server is given up; and for its start."""
REMOVAL = r"""read _; kill -KILL -$1
ls -d "$0"/files/rollouts/*/* | sed -n 's/.*\(__[[:alnum:]]\{7\}\)$/\1/p' >"$0/ended"
for engine in podman docker; do
    $engine ps -a --format '{{.Names}}' | grep -iFf "$0/ended" | xargs -r $engine rm -fv
    for kind in network volume; do
        $engine $kind ls --format '{{.Name}}' | grep -iFf "$0/ended" | xargs -r $engine $kind rm
    done
done
for conmon in $(grep -ilFf "$0/ended" /proc/[0-9]*/cmdline); do
    grep -qx conmon "${conmon%/cmdline}/comm" && cat "${conmon%/cmdline}"/task/*/children | xargs -r kill -KILL
done"""
"""A shell script that waits until a server has ended, then removes its trials' containers, networks and volumes by the
trial ids in their names. Harbor leaves them if it was cancelled or killed early: Ray and the watchdog kill it soon
after the generator's or the run's end. A podman that is killed while it creates a container leaves a process that `rm`
does not know."""


class TrialFailed(Exception):
    """Raised if a trial failed. Each kind of failure is a subclass, with Harbor's name of the failure."""


class Trial:
    """One trial of a task."""

    def __init__(
        self,
        agent: str = "terminus-2",
        environment: str = "docker",
        model: str = "openai/policy",
        reward: str = "reward",
        job: str = "",
        server: str = "",
        program: str = "harbor",
        trials: str = "trials",
        keep: Literal["failed", "all", "none"] = "failed",
        variables: str = "",
    ) -> None:
        """`agent`: Harbor's name of an agent, or `module:Class`. `environment`: Harbor's name of a kind of environment.

        `model`: the model's name for the agent; empty for an agent without a model. `reward`: the name of the
        verifier's number that is the reward, if there are several. `job`: a file with further settings of a job, as for
        `harbor run`. `server`: address of a running server, whose key is in the variable HARBOR_API_KEY. Without it
        each generator starts `program`. `keep`: the trials whose folders stay in the folder `trials`. `variables`:
        names of more environment variables for the server; tasks can read all variables of the server.

        Raises:
            UserError: the job's file cannot be read, or an option has another value.
        """
        if keep not in ("failed", "all", "none"):
            raise UserError(f"env.options.keep: {keep!r} is none of failed, all, none")
        try:
            settings = yaml.safe_load(Path(job).read_text(encoding="utf-8")) if job else {}
            self._job: dict[str, Any] = {"agents": [], "environment": {}} | (settings or {})
            self._of_agent = {"env": {}} | next(iter(self._job["agents"]), {})
            self._of_agent["env"] = {} | self._of_agent["env"]
            self._of_environment = {} | self._job["environment"]
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"env.options.job: {job} cannot be read: {error}") from error
        except TypeError as error:
            has = "`agents`, a list of mappings, and `environment`, a mapping"
            raise UserError(f"env.options.job: {job} is no job of Harbor, which has {has}") from error
        self._agent, self._environment, self._model = agent, environment, model
        self._reward, self._keep = reward, keep
        self._server, self._program, self._trials = server, program, Path(trials)
        self._variables = variables.replace(",", " ").split()

    def check_task(self, task: Task) -> None:
        """Raise `ValueError` if the row is no task of Harbor."""
        if not (Path(str(task.extra_info.get(FOLDER))) / "task.toml").is_file():
            raise ValueError(
                f"the column {FOLDER} names no folder with task.toml; give a folder of tasks in data.train"
            )

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Run the trial, and finish the session with its reward.

        Raises:
            TrialFailed: the trial has no valid reward.
        """
        server = _Server(self._server, {"Authorization": f"Bearer {os.environ.get('HARBOR_API_KEY', '')}"})
        if not self._server:
            server = await _started(self._program, self._trials, self._variables)
        timeout = aiohttp.ClientTimeout(ANSWER_SECONDS)
        async with aiohttp.ClientSession(server.url, headers=server.headers, timeout=timeout) as http:
            ask = partial(_asked, http, failed=server.check)
            body, key = {"config": self.settings(session, task)}, {"Idempotency-Key": str(uuid4())}
            submitted = asyncio.create_task(ask("POST", "/jobs/submit", body, key))
            ended, failed = False, True
            try:
                rollout = await _ended_rollout(ask, (await asyncio.shield(submitted))["job_id"])
                ended = True
                reward, parts = rewards_of(rollout, self._reward)
                failed = False
                session.finish(reward, info=parts)
            finally:
                job = f"jobs/{(await submitted)['job_id']}"
                if not ended:  # the deadline, or the trajectory was cancelled
                    await ask("POST", f"/{job}/cancel", {"force": True})
                elif server.data is not None and self._keep != "all" and not (failed and self._keep == "failed"):
                    for folder in (job, f"rollouts/{rollout['id']}"):
                        await asyncio.to_thread(shutil.rmtree, server.data / "files" / folder, ignore_errors=True)

    def settings(self, session: AgentSession, task: Task) -> dict[str, Any]:
        """The job of one trial, as Harbor's `JobConfig`."""
        agent = {
            **self._of_agent,
            "name": None,
            "import_path": None,
            "import_path" if ":" in self._agent else "name": self._agent,
        }
        if self._model:
            provider = self._model.partition("/")[0]
            key = f"{provider.upper()}_API_KEY"
            url = session.base_url.removesuffix("/v1") if provider == "anthropic" else session.base_url
            agent |= {"model_name": self._model, "base_url": url, "model_api_key_name": key}
            agent["env"] = {**agent["env"], key: session.key}
        kind = "import_path" if ":" in self._environment else "type"
        return {
            **self._job,
            "job_name": session.base_url.split("/")[-2],
            "datasets": [],
            "tasks": [{"path": task.extra_info[FOLDER]}],
            "agents": [agent],
            "environment": {**self._of_environment, "type": None, "import_path": None, kind: self._environment},
            "n_attempts": 1,
            "n_concurrent_trials": 1,
            "retry": {"max_retries": 0},
        }


def rewards_of(rollout: Mapping[str, Any], name: str) -> tuple[float, dict[str, float]]:
    """The reward of an ended trial, and all numbers of its verifier.

    Raises:
        TrialFailed: there is no such number, Harbor does not count it as valid, or Harbor does not know the failure.
    """
    result = rollout["result"] or {}
    failures = [part.get("exception_info") for part in (result, *(result.get("step_results") or ()))]
    for failure in filter(None, failures):
        policy = failure["policy"]
        # Harbor also grades after failures that it does not know
        if policy["should_retry"] or not policy["has_valid_reward"]:
            raise _failure(failure["exception_type"], failure["exception_message"], rollout)
    if rollout["state"] != "finished":
        raise _failure("CancelledError", "the trial was cancelled", rollout)
    parts = {part: float(number) for part, number in (rollout["rewards"] or {}).items() if number is not None}
    if len(parts) == 1 and name not in parts:
        (name,) = parts
    if name not in parts:
        raise _failure("NoReward", f"the verifier gave no {name!r}, only {sorted(parts)}", rollout)
    return parts[name], parts


def _failure(kind: str, why: str, rollout: Mapping[str, Any]) -> TrialFailed:
    made: type[TrialFailed] = type(kind, (TrialFailed,), {})
    return made(f"{why.strip()[-2000:]} (trial {rollout['id']} of {rollout['task']['name']})")


class _Server(NamedTuple):
    url: str
    headers: dict[str, str]
    data: Path | None = None
    """The server's folder; None for a server that another process started."""
    process: subprocess.Popen[bytes] | None = None

    def check(self, error: Exception) -> None:
        """Raise `TrialFailed` if this process started the server and it has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise TrialFailed(f"harbor serve ended with code {code}; see {self.data}/server.log") from error


_servers: dict[tuple[str, Path], _Server] = {}
"""The servers that this process started, by program and folder."""
_starting = asyncio.Lock()


async def _started(program: str, trials: Path, variables: Collection[str]) -> _Server:
    """The server of this process; starts it if it does not run. When this process ends, the server ends its trials and
    itself."""
    async with _starting:
        known = _servers.get((program, trials))
        if known is not None and known.process is not None and known.process.poll() is None:
            return known
        if (found := shutil.which(program) or shutil.which(MADE)) is None:
            raise UserError(f"env.options.program: there is no program {program!r}; `make harbor` installs it")
        trials.mkdir(parents=True, exist_ok=True)
        data = Path(tempfile.mkdtemp(prefix="server-", dir=trials.resolve()))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        key = secrets.token_urlsafe()
        words = ["setpriv", "--pdeathsig", "TERM", found, "serve", "--port", str(port), "--data-dir", str(data)]
        path = f"{Path(found).absolute().parent}:{os.environ.get('PATH', os.defpath)}"  # podman-compose is beside it
        passed = {name: os.environ[name] for name in os.environ if name in variables or PASSED.fullmatch(name)}
        # a class of the user's own may be in the current folder
        given = {"PYTHONPATH": os.getcwd(), "HARBOR_TELEMETRY": "0", **passed, "HARBOR_API_KEY": key, "PATH": path}
        read, write = os.pipe()
        with (data / "server.log").open("wb") as output, open(read, "rb") as ended, open(write, "wb") as held:
            options: dict[str, Any] = {"stdout": output, "stderr": output, "env": given, "start_new_session": True}
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=[held.fileno()], **options)
            removal = ["setsid", "--fork", "sh", "-c", REMOVAL, str(data), str(process.pid)]
            subprocess.run(removal, check=True, stdin=ended, **options)
        server = _Server(f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}, data, process)
        _servers[program, trials] = server
        async with aiohttp.ClientSession(server.url, headers=server.headers) as http:
            ask, errors = partial(_asked, http, "GET", "/jobs", within=0), aiohttp.ClientError
            await retried(ask, errors, Backoff(POLL_SECONDS), within=START_SECONDS, failed=server.check)
        log.info("harbor serve runs at %s, with its trials in %s", server.url, data)
        return server


async def _ended_rollout(ask: Callable[..., Awaitable[Any]], job_id: str) -> Any:
    """The job's only rollout, when it has ended."""
    while True:
        (rollout,) = (await ask("GET", f"/rollouts?job_ids={job_id}"))["items"]
        if rollout["state"] in ("finished", "cancelled"):
            return (await ask("GET", f"/rollouts/{rollout['id']}"))["rollout"]
        await asyncio.sleep(POLL_SECONDS)


async def _asked(
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    within: float = OUTAGE_SECONDS,
    failed: Callable[[Exception], None] = lambda error: None,
) -> Any:
    """The server's answer. After a lost connection, tries again for `within` seconds, unless `failed` raises.

    Raises:
        TrialFailed: the server refused the request.
    """

    async def ask() -> Any:
        async with http.request(method, path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    errors = (aiohttp.ClientError, TimeoutError)
    status, said = await retried(ask, errors, Backoff(0.5, 5.0), within=within, failed=failed)
    if status >= 400 and not (status == 409 and "job_id" in said):  # 409: an earlier try was accepted
        raise TrialFailed(f"harbor serve refused {path}: {status} {said.get('detail', said)!s:.2000}")
    return said
