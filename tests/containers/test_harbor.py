"""Trials of Harbor in containers of podman: rewards, exact tokens, failures by name, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton import harbor
from baton.harbor import Trial
from service.agents.session import Session
from service.rollout.chat.chat import Chat
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Task, TrajectoryFailed
from service.rollout.prompts.dataset import load_tasks
from tests.containers.tasks import make_tasks
from tests.pure.agents.endpoint import ScriptedServer, opened, whole

PROGRAM = Path(__file__).parents[2] / ".venv-harbor" / "bin" / "harbor"
pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs `make harbor`"),
    pytest.mark.usefixtures("nothing_left"),
]


def keys(*typed: str, done: bool = False) -> str:
    """A reply as Terminus-2 reads it."""
    commands = [{"keystrokes": f"{line}\n", "duration": 1.0} for line in typed]
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})


SCRIPTS = {
    "terminus-2": [keys("echo blue > /app/colour.txt"), keys(done=True), keys(done=True)],
    "oracle": [],
    "nop": [],
}


@pytest.fixture(scope="module")
def tasks(base_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Task]]:
    """The ten tasks by name."""
    folder = tmp_path_factory.mktemp("tasks")
    make_tasks(folder, base_image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{PROGRAM.parent}:{os.environ['PATH']}")
        yield {task.uid: task for task in load_tasks(folder)}
    for process, _ in harbor._servers.values():
        process.terminate()
        process.wait(60)
    harbor._servers.clear()


async def tried(
    server: ScriptedServer, task: Task, agent: str, trials: Path, number: int = 0, deadline: float = 600.0
) -> Session:
    model = "openai/policy" if agent == "terminus-2" else ""
    session, allowed = server.session(number), replace(server.allowed, step_deadline=deadline)
    make = lambda: Trial(agent, "podman", model, program=str(PROGRAM), trials=str(trials))  # noqa: E731
    guard = EnvGuard("harbor", make, allowed)
    try:
        await guard.play(session, task, 0)
    finally:
        await guard.close(session.trajectory)
    return session


async def test_ten_tasks_at_once_have_the_rewards_of_their_verifiers(
    bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path
) -> None:
    async with opened(bytes_chat) as server:
        solved, left = [
            await asyncio.gather(
                *(tried(server, task, agent, tmp_path, n) for n, task in enumerate(tasks.values(), at))
            )
            for at, agent in ((0, "oracle"), (100, "nop"))
        ]
    assert [session.ended.result().reward for session in solved] == [1.0] * 10
    assert [session.ended.result().reward for session in left] == [0.0] * 10
    assert list(tmp_path.glob("server-*/files/rollouts/*")) == []  # of trials that ended well


async def test_terminus_works_in_the_container_and_its_tokens_are_exact(
    bytes_chat: Chat, tasks: dict[str, Task], tmp_path: Path
) -> None:
    replies = iter(SCRIPTS["terminus-2"])
    async with opened(bytes_chat) as server:
        server.allowed = replace(server.allowed, max_input_length=100_000)
        server.max_tokens = 1_000_000
        server.say = lambda prompt: next(replies)
        session = await tried(server, tasks["write-file"], "terminus-2", tmp_path)
    assert session.ended.result().reward == 1.0 and session.refused == ""
    assert whole(server.steps) == server.prompts and server.is_exact and len(server.prompts) == 3


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
        toml = (folder / "task.toml").read_text().replace("timeout_sec = 60.0", "timeout_sec = 5.0")
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
        process, _ = harbor._servers[str(PROGRAM), tmp_path]
        assert process.poll() is None
        process.terminate()  # it ends what it runs
        assert await asyncio.to_thread(process.wait, 90) is not None
