"""Trials of Harbor in containers of podman: rewards, exact tokens, failures by name, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton import harbor
from baton.harbor import Trial
from service.agents.session import Session
from service.rollout.chat.chat import Chat
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Task, TrajectoryFailed
from service.rollout.prompts.dataset import load_tasks
from tests.containers.conftest import podman
from tests.containers.tasks import TASKS, make_tasks
from tests.pure.agents.endpoint import ScriptedServer, opened, whole
from tests.pure.agents.own_environment import python_with
from tests.pure.agents.test_published_agents import AGENTS, from_npm

PROGRAM = Path(__file__).parents[2] / ".venv-harbor" / "bin" / "harbor"
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs `make harbor`"),
    pytest.mark.usefixtures("nothing_left"),
]


def keys(*typed: str, done: bool = False) -> str:
    """A reply as Terminus-2 reads it."""
    commands = [{"keystrokes": f"{line}\n", "duration": 1.0} for line in typed]
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})


def bash(command: str) -> str:
    """A reply as mini-swe-agent and opencode read it."""
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>"


SCRIPTS: Mapping[str, Callable[[str], Sequence[str]]] = {
    "terminus-2": lambda solution: [keys("cd /app", solution), keys(done=True), keys(done=True)],
    "mini-swe-agent": lambda solution: [bash(solution), bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
    "opencode": lambda solution: [bash(solution), "Done."],
}
UNSOLVED = ("branch", "query")
"""Tasks in which an agent does nothing."""


def job_of(agent: str, folder: Path) -> str:
    """A job's file for an agent in the container, which gets it from this machine instead of from an image."""
    if agent == "terminus-2":
        return ""
    if agent == "opencode":
        shown = {str(from_npm(agent, AGENTS[agent].package).resolve()): "/usr/local/bin/opencode"}
    else:
        python = python_with("mini-swe-agent==2.4.6", "mcp")
        here, program = str(python.parents[1].resolve()), str(python.with_name("mini-swe-agent").resolve())
        shown = {here: here, sys.base_prefix: sys.base_prefix, program: "/usr/local/bin/mini-swe-agent"}
    mounts = [{"type": "bind", "source": at, "target": to, "read_only": True} for at, to in shown.items()]
    job = {"agents": [{"kwargs": {"skip_install": True}}], "environment": {"mounts": mounts}}
    (folder / "job.yaml").write_text(json.dumps(job))
    return str(folder / "job.yaml")


def own_address() -> str:
    """An address of this machine that a container on a bridge reaches."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))  # sends nothing
        return str(asked.getsockname()[0])


@pytest.fixture(scope="module")
def tasks(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Task]]:
    """The ten tasks by name."""
    folder = tmp_path_factory.mktemp("tasks")
    make_tasks(folder, base_image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{PROGRAM.parent}:{os.environ['PATH']}")
        yield {task.uid: task for task in load_tasks(folder)}
    for server in harbor._servers.values():
        assert server.process is not None
        server.process.terminate()
        server.process.wait(60)
    harbor._servers.clear()


@pytest.fixture(autouse=True)
def own_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has an event loop of its own, and a lock belongs to the first loop in which somebody waited for it."""
    monkeypatch.setattr(harbor, "_starting", asyncio.Lock())


async def tried(
    server: ScriptedServer,
    task: Task,
    agent: str,
    trials: Path,
    number: int = 0,
    deadline: float = 1800.0,
    **options: Any,
) -> Session:
    model = "openai/policy" if agent in SCRIPTS else ""
    session, allowed = server.session(number), replace(server.allowed, step_deadline=deadline)
    make = lambda: Trial(agent, "podman", model, program=str(PROGRAM), trials=str(trials), **options)  # noqa: E731
    guard = EnvGuard("harbor", make, allowed)
    try:
        await guard.play(session, task, 0)
    finally:
        await guard.close(session.trajectory)
    return session


async def test_twenty_trials_at_once_have_the_rewards_of_their_verifiers(
    bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path
) -> None:
    async with opened(bytes_chat) as server:
        chosen = [(task, agent) for agent in ("oracle", "nop") for task in tasks.values()]
        sessions = await asyncio.gather(
            *(tried(server, task, agent, tmp_path, n) for n, (task, agent) in enumerate(chosen))
        )
    assert [session.ended.result().reward for session in sessions] == [1.0] * 10 + [0.0] * 10
    assert list(tmp_path.glob("server-*/files/rollouts/*")) == []  # of trials that ended well


@pytest.mark.parametrize("agent", SCRIPTS)
async def test_an_agent_solves_eight_of_ten_tasks_and_its_tokens_are_exact(
    bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path, agent: str
) -> None:
    left = {name: iter(SCRIPTS[agent]("true" if name in UNSOLVED else TASKS[name].solution)) for name in tasks}
    job = job_of(agent, tmp_path)

    def say(prompt: str) -> str:
        named = next(name for name in tasks if TASKS[name].instruction in prompt)
        return "A title" if "title generator" in prompt else next(left[named])

    async with opened(bytes_chat, host=own_address()) as server:
        server.allowed = replace(server.allowed, max_input_length=100_000)
        server.max_tokens = 1_000_000
        server.say = say
        ended = await asyncio.gather(
            *(tried(server, task, agent, tmp_path, n, job=job, keep="all") for n, task in enumerate(tasks.values()))
        )
    rewards = [session.ended.result().reward for session in ended]
    assert rewards == [float(name not in UNSOLVED) for name in tasks] and not any(one.refused for one in ended)
    files = tmp_path.glob("server-*/files/rollouts/**/reward.txt")
    assert sorted(float(file.read_text()) for file in files) == sorted(rewards)  # the verifiers'
    by_trial = [[step for step in server.steps if step.trajectory == session.trajectory] for session in ended]
    assert sorted(prompt for steps in by_trial for prompt in whole(steps)) == sorted(server.prompts)
    sampled = sorted(step.response_ids[step.loss_mask].tolist() for step in server.steps)
    assert sampled == sorted(server.replies)
    asked = len(SCRIPTS[agent]("")) + (agent == "opencode")  # for a title
    assert [*map(len, by_trial)] == [asked] * 10


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("environment/Dockerfile", "FROM localhost/no-such-image:1\n", "Error"),
        ("tests/test.sh", "true\n", "RewardFileNotFoundError"),
        ("tests/test.sh", "sleep 100\n", "VerifierTimeoutError"),
    ],
)
async def test_a_trial_that_fails_says_why_and_gives_no_reward(
    bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path, file: str, text: str, why: str
) -> None:
    task, folder = tasks["write-file"], tmp_path / "broken"
    shutil.copytree(str(task.extra_info[harbor.FOLDER]), folder)
    (folder / file).write_text(text)
    if why == "VerifierTimeoutError":
        toml = (folder / "task.toml").read_text().replace("timeout_sec = 120.0", "timeout_sec = 5.0")
        (folder / "task.toml").write_text(toml)
    async with opened(bytes_chat) as server:
        with pytest.raises(TrajectoryFailed, match=why) as failed:
            await tried(server, replace(task, extra_info={harbor.FOLDER: str(folder)}), "oracle", tmp_path / "trials")
    assert why in failed.value.error
    assert len(list((tmp_path / "trials").glob("server-*/files/rollouts/*"))) == 1  # kept


async def test_a_deadline_ends_the_trial_and_its_container(
    bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path
) -> None:
    async with opened(bytes_chat) as server:
        server.allowed = replace(server.allowed, max_input_length=100_000)
        server.sampling.clear()  # the policy does not answer
        with pytest.raises(TrajectoryFailed, match="environment_timeout"):
            await tried(server, tasks["write-file"], "terminus-2", tmp_path, deadline=60.0)
        process = harbor._servers[str(PROGRAM), tmp_path].process
        assert process is not None and process.poll() is None
        process.terminate()  # it ends what it runs
        assert await asyncio.to_thread(process.wait, 90) is not None


async def test_what_a_killed_server_leaves_is_removed(bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path) -> None:
    async with opened(bytes_chat) as server, asyncio.timeout(180):
        server.allowed = replace(server.allowed, max_input_length=100_000)
        server.sampling.clear()  # the policy does not answer
        playing = asyncio.create_task(tried(server, tasks["write-file"], "terminus-2", tmp_path))
        while not server.prompts:
            await asyncio.sleep(0.5)
        process = harbor._servers[str(PROGRAM), tmp_path].process
        assert process is not None and podman("ps", "-q")
        process.kill()
        with pytest.raises(TrajectoryFailed, match="harbor serve ended with code -9"):
            await playing
        while podman("ps", "-aq") or len(podman("network", "ls", "-q").split()) > 1:
            await asyncio.sleep(0.5)
