"""Environments in processes of their own: what one does to itself, it does to nobody else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from service.rollout.agent_loop import TrajectoryResult
from service.rollout.chat.chat import Chat
from service.rollout.child_main import KILL_SECONDS
from service.rollout.child_process import STARTED_SECONDS, ChildDied, ChildProcesses
from service.rollout.environment import Message, OversizedOutput, Task
from service.rollout.factory import IsolatedEnvironment, environment_processes
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, play

HERE = "tests.pure.rollout.misbehaving"
FORKS = """
import ctypes, os, time
import psutil
from service.rollout import child_main

def late(self, recursive, children=psutil.Process.children):
    found = children(self, recursive)
    time.sleep(0.2)  # as on a machine with many processes
    return found

psutil.Process.children, child_main.KILL_SECONDS = late, 5
ctypes.CDLL(None).prctl(child_main.PR_SET_CHILD_SUBREAPER, 1)
if not os.fork():
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if os.fork():
            os._exit(0)
    os._exit(0)
time.sleep(0.2)
child_main.end_descendants()
"""
"""A process that does nothing but fork and exit, and its keeper."""


@asynccontextmanager
async def started() -> AsyncIterator[ChildProcesses]:
    processes = environment_processes(max_observation_characters=100_000)
    try:
        yield processes
    finally:
        await processes.close()


def isolated(processes: ChildProcesses, name: str, **options: str) -> IsolatedEnvironment:
    return IsolatedEnvironment(processes, f"{HERE}:{name}", options, [HERE])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Blocks", "environment_timeout"),
        ("Segfaults", "environment_error"),
        ("Exits", "environment_error"),
        ("Floods", "environment_output"),
    ],
)
async def test_whatever_an_isolated_environment_does_costs_its_own_trajectory_only(
    chat: Chat, name: str, reason: str
) -> None:
    async with started() as processes:
        engine = ScriptedEngine(chat, lambda words: "look fox age")
        deadline = 2.0 if name == "Blocks" else 240.0
        (_, bad), (steps, good) = await asyncio.gather(
            play(chat, engine, isolated(processes, name), step_deadline=deadline),
            play(chat, engine, isolated(processes, "Echo"), step_deadline=240.0),
        )
        assert (bad.stop_reason, bad.n_steps) == (reason, 0)
        assert (good.stop_reason, good.n_steps, good.reward) == ("max_turns", 4, 0.5)
        assert len(steps) == 4


async def test_an_episode_in_a_process_hears_and_answers_like_one_outside_and_the_process_is_used_again() -> None:
    async with started() as processes:
        task = Task("p", (Message(role="user", content="héllo\n"),), "", {"ground_truth": "1"}, {"n": [1, 2]})
        seen = []
        for _ in range(2):
            episode = isolated(processes, "Echo", suffix=" !")
            assert list(await episode.reset(task, 3)) == list(task.prompt)
            result = await episode.step("ünïcode \u2028 line")
            message = {"role": "user", "content": "ünïcode \u2028 line !"}
            assert (result.messages, result.reward, result.done) == ([message], 0.5, False)
            await episode.close()
            seen.append(int(result.info["pid"]))
        first, again = seen
        assert first == again != os.getpid()
        broken = isolated(processes, "Blocks")
        await broken.reset(QUESTION, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await broken.step("?")
        await broken.close()
        await ended(first)
        episode = isolated(processes, "ReadsTools")
        (message,) = await episode.reset(Task("p", QUESTION.prompt, "", tools=({"name": "find"},), temperature=0.5), 0)
        assert message["content"] == "[{'name': 'find'}] 0.5"
        await episode.close()


async def ended(pid: int) -> None:
    """Returns once the process has ended, although nobody may have asked for its exit code; at most two minutes."""
    async with asyncio.timeout(120):
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.01)


async def test_closing_ends_every_process_also_one_that_blocks() -> None:
    async with started() as processes:
        episode = isolated(processes, "Echo")
        await episode.reset(QUESTION, 0)
        pid = int((await episode.step("?")).info["pid"])
        blocked = isolated(processes, "Blocks")
        await blocked.reset(QUESTION, 0)
        waiting = asyncio.ensure_future(blocked.step("?"))
        await asyncio.sleep(0)
        await processes.close()
        await ended(pid)
        with pytest.raises(Exception, match="process ended with code -9"):
            await waiting


def pipes() -> set[str]:
    """The pipes of this process."""
    open_files = (os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    return {name for name in open_files if name.startswith("pipe:")}


async def test_a_process_that_still_writes_when_it_is_ended_keeps_neither_its_owner_nor_a_pipe() -> None:
    async with started() as processes:
        before, of_others = pipes(), set(psutil.Process().children())
        episode = isolated(processes, "Floods")
        await episode.reset(QUESTION, 0)
        (keeper,) = set(psutil.Process().children()) - of_others
        opened = pipes() - before
        assert opened
        keeper.suspend()  # what its child writes after the first bytes too many comes before its end
        try:
            with pytest.raises(OversizedOutput):
                await episode.step("?")
            for _ in range(50):
                await asyncio.sleep(0.01)
        finally:
            keeper.resume()
        async with asyncio.timeout((KILL_SECONDS + STARTED_SECONDS) / 2):  # half of what a pipe that is open takes
            await processes.close()
        assert not opened & pipes()


@pytest.mark.parametrize(
    ("name", "suffix", "n_steps", "reason"),
    [("ReadsStdin", "17", 4, "max_turns"), ("Forks", "", 4, "max_turns"), ("CountsInNumpy", "", 1, "stop")],
)
async def test_what_an_isolated_environment_does_beside_its_answers_disturbs_none(
    chat: Chat, name: str, suffix: str, n_steps: int, reason: str
) -> None:
    """A child reads its stdin, it forks itself, or it answers in numpy's numbers."""
    async with started() as processes:
        options = {"suffix": suffix} if suffix else {}
        for _ in range(2):
            steps, end = await play(chat, "look fox age", isolated(processes, name, **options), step_deadline=240.0)
            assert (len(steps), end.stop_reason, end.reward) == (n_steps, reason, 0.5)


async def test_an_answer_to_an_earlier_request_is_never_taken_for_one_to_the_latest(chat: Chat) -> None:
    async with started() as processes:
        seen: list[TrajectoryResult] = []
        environment = isolated(processes, "Scribbles")
        steps, end = await play(chat, "look fox age", environment, step_deadline=240.0, observe=seen.append)
        assert (steps, end.stop_reason) == ([], "environment_error")
        assert "answered an earlier request a second time" in seen[0].failure


@pytest.mark.parametrize("name", ["Detaches", "KeepsTheInterpreter"])
async def test_what_an_environment_started_ends_when_it_dies_or_its_answer_is_no_longer_waited_for(
    tmp_path: Path, name: str
) -> None:
    async with started() as processes:
        episode = isolated(processes, name, suffix=str(tmp_path / "pid"))
        await episode.reset(QUESTION, 0)
        if name == "Detaches":
            with pytest.raises(ChildDied, match="ended with code 3"):
                await episode.step("?")
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await episode.step("?")
        await episode.close()
        await ended(int((tmp_path / "pid").read_text()))


GENERATOR = """
import asyncio, sys
from service.rollout.environment import Task
from service.rollout.factory import IsolatedEnvironment, environment_processes

async def play(name, module, pid_file):
    episode = IsolatedEnvironment(environment_processes(1000), f"{module}:{name}", {"suffix": pid_file}, [module])
    await episode.reset(Task("p", (), ""), 0)
    print("begun", flush=True)
    await (episode.step("?") if name == "KeepsTheInterpreter" else asyncio.Event().wait())

asyncio.run(play(*sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["Detaches", "KeepsTheInterpreter"])
async def test_what_an_environment_started_ends_when_its_generator_is_killed(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", GENERATOR, name, HERE, str(tmp_path / "pid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as generator:
        try:
            assert generator.stdout is not None and generator.stdout.readline() == "begun\n"
            children = psutil.Process(generator.pid).children(recursive=True)
        finally:
            generator.kill()
    for pid in {int((tmp_path / "pid").read_text()), *(child.pid for child in children)}:
        await ended(pid)


async def test_every_episode_of_a_process_begins_in_the_same_folder_and_with_an_open_output() -> None:
    async with started() as processes:
        seen = []
        for _ in range(3):
            episode = isolated(processes, "Wanders")
            (message,) = await episode.reset(QUESTION, 0)
            seen.append((message["content"], (await episode.step("?")).info["pid"]))
            await episode.close()
        assert seen == [(os.getcwd(), seen[0][1])] * 3


def test_a_process_that_only_forks_and_exits_is_ended_with_the_others() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=60).returncode == 0
