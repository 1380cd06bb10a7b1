"""Harbor's tasks as rows, and what the answers of its server mean: a server that follows a script."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from baton.examples import harbor_tiny
from baton.harbor import REMOVAL, Trial, TrialFailed
from service.config import load_config
from service.config.paths import check_paths
from service.errors import UserError
from service.rollout.environment import Task
from service.rollout.prompts.dataset import load_tasks
from tests.waiting import ran, until

VALID = {"should_retry": False, "has_valid_reward": True}
UNKNOWN, INVALID = VALID | {"should_retry": True}, VALID | {"has_valid_reward": False}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """The only task of a folder."""
    folder = tmp_path / "tasks" / "first"
    folder.mkdir(parents=True)
    (folder / "task.toml").touch()
    (folder / "instruction.md").write_text("Make it blue.")
    (row,) = load_tasks(tmp_path / "tasks")
    return row


@asynccontextmanager
async def harbor(ended: Callable[[], dict[str, Any]]) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server's address, and what it was asked; `ended` gives a trial's state."""
    asked: list[Any] = []

    async def submit(request: web.Request) -> web.Response:
        asked.append((await request.json())["config"])
        return web.json_response({"job_id": "j", "detail": "was accepted before"}, status=409)

    async def cancel(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({})

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"items": [ended() | {"id": "r"}]})

    async def detail(request: web.Request) -> web.Response:
        return web.json_response({"rollout": {"id": "r", "task": {"name": "t"}, "result": None} | ended()})

    app = web.Application()
    app.add_routes([web.post("/jobs/submit", submit), web.post("/jobs/j/cancel", cancel)])
    app.add_routes([web.get("/rollouts", listed), web.get("/rollouts/r", detail)])
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    try:
        yield site.name, asked
    finally:
        await runner.cleanup()


def session(finished: list[Any]) -> Any:
    finish = lambda reward, info: finished.append((reward, info))  # noqa: E731
    return SimpleNamespace(base_url="http://127.0.0.1:9/s/1-2-3/v1", key="the key", finish=finish)


def test_a_folder_of_tasks_is_a_dataset_and_another_folder_is_none(task: Task, tmp_path: Path) -> None:
    assert (task.uid, task.prompt[0]["content"]) == ("first", "Make it blue.")
    Trial().check_task(task)
    with pytest.raises(ValueError, match="task_folder"):
        Trial().check_task(Task("p", (), ""))
    others = ["model.make={hidden_size: 128, num_layers: 2}"]
    assert check_paths(load_config([], [f"data.train={tmp_path / 'tasks'}", *others])) == []
    with pytest.raises(UserError, match=r"has no \.jsonl or \.parquet files"):
        load_tasks(tmp_path)


@pytest.mark.parametrize(
    ("model", "url", "variable"),
    [
        ("openai/policy", "http://127.0.0.1:9/s/1-2-3/v1", "OPENAI_API_KEY"),
        ("anthropic/policy", "http://127.0.0.1:9/s/1-2-3", "ANTHROPIC_API_KEY"),
    ],
)
async def test_the_agent_gets_the_session_and_the_verifiers_number_is_the_reward(
    task: Task, tmp_path: Path, model: str, url: str, variable: str
) -> None:
    others = {"agents": [{"name": "nop", "kwargs": {"max_turns": 3}}], "datasets": [{"path": "all"}], "debug": True}
    (job := tmp_path / "job.json").write_text(json.dumps({**others, "environment": {"type": "docker"}}))
    finished: list[Any] = []
    async with harbor(lambda: {"state": "finished", "rewards": {"tests": 0.5, "reward": 1}}) as (server, asked):
        await Trial("my:Agent", "my:Podman", model, job=str(job), server=server).play(session(finished), task, 0)
    assert finished == [(1.0, {"tests": 0.5, "reward": 1.0})]
    (config,) = asked  # nothing was cancelled
    assert config["tasks"] == [{"path": task.extra_info["task_folder"]}] and config["debug"]
    assert config["environment"] == {"type": None, "import_path": "my:Podman"} and config["datasets"] == []
    (agent,) = config["agents"]
    assert agent["name"] is None  # Harbor would prefer it to the class
    assert agent["env"] == {variable: "the key"} and agent["kwargs"] == {"max_turns": 3}
    assert (agent["import_path"], agent["base_url"], agent["model_api_key_name"]) == ("my:Agent", url, variable)


@pytest.mark.parametrize(
    "text", ["- a", "agents: a", "agents: null", "agents: {name: a}", "agents: [{env: null}]", "environment: null"]
)
def test_a_file_that_is_no_job_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    (job := tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match=r"env\.options\.job: .*job\.yaml is no job of Harbor"):
        Trial(job=str(job))


@pytest.mark.parametrize(
    ("policy", "rewards", "state", "kind"),
    [
        (VALID, {"reward": 0}, "finished", None),
        (INVALID, {"reward": None}, "finished", "SomeError"),
        (UNKNOWN, {"reward": 0}, "finished", "SomeError"),
        (None, {"reward": 0}, "cancelled", "CancelledError"),
        (None, None, "finished", "NoReward"),
        (None, {"a": 0, "b": 0}, "finished", "NoReward"),
    ],
)
async def test_only_a_valid_reward_counts(
    task: Task, policy: dict[str, bool] | None, rewards: Any, state: str, kind: str | None
) -> None:
    failure = policy and {"exception_type": "SomeError", "exception_message": "why", "policy": policy}
    answer = {"state": state, "rewards": rewards, "result": {"step_results": [{"exception_info": failure}]}}
    answer["result"]["exception_info"] = None
    finished: list[Any] = []
    async with harbor(lambda: answer) as (server, _):
        trial = Trial(server=server)
        if kind is None:
            await trial.play(session(finished), task, 0)
        else:
            with pytest.raises(TrialFailed) as failed:
                await trial.play(session(finished), task, 0)
            assert type(failed.value).__name__ == kind
    assert finished == ([(0.0, {"reward": 0.0})] if kind is None else [])


async def test_a_trial_that_is_not_awaited_any_more_is_cancelled(task: Task) -> None:
    async with harbor(lambda: {"state": "running"}) as (server, asked):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await Trial(server=server).play(session([]), task, 0)
        assert asked[1:] == [{"force": True}]


async def test_the_server_that_a_generator_starts_gets_no_secret_but_those_that_are_named(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "E2B_API_KEY", "DOCKER_HOST", "HARBOR_API_KEY"):
        monkeypatch.setenv(name, "secret")
    (program := tmp_path / "harbor").write_text('#!/bin/sh\nenv > "$0.env"\n')
    program.chmod(0o755)
    trial = Trial(program=str(program), trials=str(tmp_path / "trials"), variables="OTHER, E2B_API_KEY")
    with pytest.raises(TrialFailed, match="harbor serve ended"):
        await trial.play(session([]), task, 0)
    given = dict(line.split("=", 1) for line in Path(f"{program}.env").read_text().splitlines())
    assert {name for name, value in given.items() if value == "secret"} == {"E2B_API_KEY", "DOCKER_HOST"}
    assert given["PYTHONPATH"] == str(Path.cwd())  # for the user's own classes


DIES = """#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Serve(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/jobs":
            os._exit(9)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{{"job_id": "j"}}')
    def do_POST(self):
        self.path = "/jobs"
        self.do_GET()
HTTPServer(("127.0.0.1", int(sys.argv[3])), Serve).serve_forever()
"""


async def test_a_trial_fails_at_once_if_its_own_server_was_killed(task: Task, tmp_path: Path) -> None:
    (program := tmp_path / "harbor").write_text(DIES.format(python=sys.executable))
    program.chmod(0o755)
    with pytest.raises(TrialFailed, match="harbor serve ended with code 9"):
        async with asyncio.timeout(30.0):
            await Trial(program=str(program), trials=str(tmp_path / "trials")).play(session([]), task, 0)


@pytest.mark.parametrize("name", ["a", "a\n\nb", "__"])
def test_the_removal_takes_nothing_but_what_the_trials_left(tmp_path: Path, name: str) -> None:
    (tmp_path / "files" / "rollouts" / "r" / f"{name}__aB3dE6g").mkdir(parents=True)
    (podman := tmp_path / "podman").write_text(
        """#!/bin/sh
case "$*" in
    *"rm "*) echo "$*" >>"$0.said" ;;
    *) printf 'somebodys__own\\nx__ab3de6g_main_1\\n' ;;
esac
"""
    )
    podman.chmod(0o755)
    path, ended = f"{tmp_path}:{os.environ['PATH']}", subprocess.Popen("true", start_new_session=True)
    ended.wait()
    shutil.copy(os.path.realpath("/bin/sh"), conmon := tmp_path / "conmon")
    with subprocess.Popen([conmon, "-c", "sleep 90 & wait", "x__ab3de6g_main_1"]) as created:
        until(Path(f"/proc/{created.pid}/task/{created.pid}/children").read_text)
        ran("sh", "-c", REMOVAL, tmp_path, str(ended.pid), PATH=path)
        created.wait(30)
    removed = [f"{verb} x__ab3de6g_main_1" for verb in ("rm -fv", "network rm", "volume rm")]
    assert (tmp_path / "podman.said").read_text().splitlines() == removed


def test_the_tiny_tasks_and_what_shows_them_have_the_words_of_the_model(tmp_path: Path) -> None:
    harbor_tiny.make_tasks(tmp_path, "image")
    tasks, shown = load_tasks(tmp_path), harbor_tiny.demonstrations(200, 0.5, np.random.default_rng(0))
    texts = [message["content"] for messages in (*shown, *(task.prompt for task in tasks)) for message in messages]
    assert {word for text in texts for word in text.split()} == {*harbor_tiny.vocabulary()} and len(tasks) == 10
    for task in tasks:
        harbor_tiny.Trial().check_task(task)
