"""Commands as agents: each in a folder of its own, and whatever one does costs its own trajectory only."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from service.agents.commands import AgentRunner, Finished
from service.config.rollout import OWN_VARIABLES, CommandConfig
from service.rollout.environment import Message, Task

HERE = "tests.pure.agents.scores"
KEY = "sk-of-this-session"
MARK = "BATON_TEST_AGENT"
"""Environment variable of the commands of one test."""
NO_ENDPOINT = "http://127.0.0.1:9/s/1/v1"
GONE_SECONDS = 60.0

LeftOver = Callable[[str, str, float], dict[int, str]]


def task(prompt: str = "", answer: str = "", **columns: Any) -> Task:
    return Task("p", (Message(role="user", content=prompt),), "", {"ground_truth": answer}, columns)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs put their folders."""
    folder = tmp_path / "folders"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@asynccontextmanager
async def runner_of(script: str, *arguments: str, **settings: Any) -> AsyncIterator[AgentRunner]:
    runner = AgentRunner(CommandConfig(command=(sys.executable, "-c", script, *arguments), **settings))
    try:
        yield runner
    finally:
        await runner.close()


async def finished(script: str, *arguments: str, of: Task | None = None, **settings: Any) -> Finished:
    async with runner_of(script, *arguments, **settings) as runner:
        return await runner.run(of or task(), NO_ENDPOINT, KEY, seed=3)


async def test_a_command_gets_its_folder_and_prompt_and_a_function_scores_what_it_left(
    tmp_path: Path, folders: Path
) -> None:
    template = tmp_path / "template"
    (template / "sub").mkdir(parents=True)
    (template / "sub" / "given").write_text("4")
    script = (
        "import os, sys; a = int(open('sub/given').read()) + int(open('more/b').read()); "
        "assert os.environ['HOME'] == os.getcwd(); open('answer', 'w').write(str(a)); print(sys.stdin.read(), a)"
    )
    row = task("What is\nthe sum?", answer="9", files={"more/b": "5"})
    got = await finished(script, of=row, workdir=template, score=f"{HERE}:answered")
    assert (got.reward, got.status, got.reason, got.transcript) == (1.0, "ok", "", "What is\nthe sum? 9\n")
    assert (template / "sub" / "given").read_text() == "4" and not (template / "answer").exists()
    assert list(folders.iterdir()) == []


async def test_placeholders_are_filled_once_and_other_braces_stay() -> None:
    script = "import sys, pathlib; print(sys.stdin.read(), *sys.argv[1:3], pathlib.Path(sys.argv[3]).read_text())"
    got = await finished(script, "{seed} {x} {prompt}", "{base_url}", "{prompt_file}", of=task("{seed}?"))
    assert got.transcript == f" 3 {{x}} {{seed}}? {NO_ENDPOINT} {{seed}}?\n"
    assert (got.reward, got.status) == (None, "ok")  # the agent posts its reward


async def test_a_command_gets_its_address_and_key_and_no_variable_of_baton_but_those_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    script = f"import os; print(*(os.environ[name] for name in {OWN_VARIABLES!r})); print(*sorted(os.environ))"
    own, names = (await finished(script, variables={"MODE": "{seed}"})).transcript.splitlines()
    assert own == f"{NO_ENDPOINT} [key] {NO_ENDPOINT.removesuffix('/v1')} [key]", "the key stays out of the transcript"
    expected = {*OWN_VARIABLES, "BATON_SEED", "HOME", "LANG", "MODE", "PATH", "TMPDIR"}
    assert expected == {*names.split()} - {"LC_CTYPE", "PWD"}  # Python's own, and the shell's


SLEEP = "import time; time.sleep(60)"
HOSTILE = {
    "ignores SIGTERM": (
        f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEP}",
        {"seconds": 2.0},
        "limits.seconds",
    ),
    "floods its output": (
        "import os\nwhile True: os.write(1, b'x' * 4096)",
        {"file_bytes": 1 << 20},
        "exit code was 1",
    ),
    "takes all memory": ("x = b'x' * (1 << 29)", {"memory_bytes": 1 << 28}, "exit code was 1"),
    "says that it failed": ("raise SystemExit(255)", {}, "exit code was 255"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", {}, "signal 9"),
    "deletes its folder": ("import os, shutil; shutil.rmtree(os.getcwd())", {}, "it removed its folder"),
    "prints its key and fails": ("import os; raise SystemExit(os.environ['OPENAI_API_KEY'])", {}, "exit code was 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_whatever_a_command_does_costs_its_own_trajectory_only(
    name: str, folders: Path, left_over: LeftOver
) -> None:
    script, limits, reason = HOSTILE[name]
    good, mark = "print(input())", secrets.token_hex(8)
    choice = f"import sys; exec({good!r} if sys.argv[1] == '1' else {script!r})"
    settings: Any = {"limits": limits, "score": f"{HERE}:length", "variables": {MARK: mark}}
    async with runner_of(choice, "{seed}", **settings) as runner:
        bad, fine = await asyncio.gather(
            runner.run(task(), NO_ENDPOINT, KEY, 2), runner.run(task("yes\n"), NO_ENDPOINT, KEY, 1)
        )
        assert reason in bad.reason and KEY not in bad.reason + bad.transcript
        is_time = "limits.seconds" in bad.reason  # what it did until then is scored
        assert (bad.status, bad.reward) == (("ok", len(bad.transcript)) if is_time else ("failed", None))
        assert (fine.reward, fine.transcript) == (4.0, "yes\n")
    assert left_over(MARK, mark, GONE_SECONDS) == {}
    assert list(folders.iterdir()) == []


async def test_what_a_command_left_running_has_ended_when_it_is_scored(left_over: LeftOver) -> None:
    script = (
        "import subprocess\n"
        "subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 600 & sleep 600'])\n"
        "subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; sleep 600 & sleep 600'])\n"
    )
    mark = secrets.token_hex(8)
    async with runner_of(
        script, score=("sh", "-c", "ps -e -o args | grep -c '[s]leep 600'"), variables={MARK: mark}
    ) as run:
        got = await run.run(task(), NO_ENDPOINT, KEY, 0)
        assert left_over(MARK, mark, 0.0) == {}
        assert (got.status, got.transcript) == ("ok", "")


async def test_removing_a_folder_follows_no_link_and_reaches_any_depth(tmp_path: Path, folders: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    script = (
        f"import os; os.symlink({str(kept)!r}, 'link'); os.symlink({str(kept / 'file')!r}, 'file')\n"
        "os.mkdir('closed'); os.chmod('closed', 0); os.mkfifo('fifo')\n"
        "for _ in range(700): os.mkdir('deeper'); os.chdir('deeper')\n"
    )
    assert (await finished(script)).status == "ok"
    assert (kept / "file").read_text() == "x" and list(folders.iterdir()) == []


async def test_memory_that_a_command_only_reserves_does_not_count() -> None:
    reserves = "import mmap; mmap.mmap(-1, 1 << 36, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)"
    got = await finished(reserves, limits={"memory_bytes": 1 << 28})
    assert (got.status, got.reason) == ("ok", "")


async def test_a_transcript_is_text_and_the_middle_of_a_long_one_is_left_out() -> None:
    script = "import sys; sys.stdout.buffer.write(b'\\xff\\x00' + b'a' * 70000 + b'end')"
    got = await finished(script, score=f"{HERE}:length")
    assert got.reward == len(got.transcript) < 1 << 17
    assert got.transcript.startswith("\ufffd\x00aaa") and got.transcript.endswith("aaend")
    assert f"[{70005 - (1 << 16)} bytes left out]" in got.transcript


@pytest.mark.parametrize(
    ("score", "reward", "reason"),
    [
        (("sh", "-c", "echo checked; echo 0.25; echo"), 0.25, ""),
        (("sh", "-c", "echo 7 passed"), 1.0, ""),
        (("sh", "-c", "echo 1; exit 127"), 0.0, ""),
        (("sh", "-c", "exit 255"), 0.0, ""),
        (("sh", "-c", 'grep -q \'"ground_truth": "9"\' && test -e here'), 1.0, ""),
        (("sh", "-c", "echo nan"), None, "its score is nan"),
        (("sh", "-c", "kill -9 $$"), None, "its score failed: it was ended by signal 9"),
        (("sleep", "600"), None, "its score was ended at limits.score_seconds (2)"),
        (f"{HERE}:never_ends", None, "never_ends was ended at limits.score_seconds (2)"),
        (f"{HERE}:nan", None, "its score is nan"),
        (f"{HERE}:answered", None, "FileNotFoundError"),
    ],
)
async def test_a_command_or_a_function_scores(score: Any, reward: float | None, reason: str) -> None:
    limits = {"score_seconds": 2.0 if "limits.score_seconds" in reason else 60.0}
    got = await finished("open('here', 'w')", of=task(answer="9"), score=score, limits=limits)
    assert (got.reward, got.status) == (reward, "ok" if reason == "" else "failed")
    assert reason in got.reason


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        (task(files={"../escaped": "x"}), {}, "is outside of the folder"),
        (task(files={"out/escaped": "x"}), {"workdir": "template"}, "is outside of the folder"),
        (task(files={"loop/x": "x"}), {"workdir": "template"}, "its folder cannot be made"),
        (task(files={"a": 1}), {}, "must be an object of paths with texts"),
        (task(), {"workdir": "missing"}, "its folder cannot be made"),
        (task(), {"command": ("no-such-command", "{prompt}")}, "its exit code was 127"),
        (task("a\0b"), {"command": ("echo", "{prompt}")}, "echo: cannot be started: embedded null byte"),
    ],
)
async def test_a_trajectory_that_cannot_begin_fails_with_the_reason(
    tmp_path: Path, row: Task, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "out").symlink_to(tmp_path)
    (tmp_path / "template" / "loop").symlink_to("loop")
    if "workdir" in settings:
        settings = {"workdir": tmp_path / settings["workdir"]}
    runner = AgentRunner(CommandConfig(**{"command": ("true",), **settings}))
    try:
        got = await runner.run(row, NO_ENDPOINT, KEY, 0)
    finally:
        await runner.close()
    assert (got.status, got.reward) == ("failed", None)
    assert reason in got.reason
    assert not (tmp_path / "escaped").exists()


async def test_a_cancelled_run_ends_with_all_its_processes_and_its_folder(folders: Path, left_over: LeftOver) -> None:
    mark = secrets.token_hex(8)
    async with runner_of(SLEEP, variables={MARK: mark}) as runner:
        running = asyncio.create_task(runner.run(task(), NO_ENDPOINT, KEY, 0))
        async with asyncio.timeout(60):
            while not processes_of(mark):
                await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert left_over(MARK, mark, 0.0) == {}
        assert list(folders.iterdir()) == []


def processes_of(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


GENERATOR = """
import asyncio, sys
from service.agents.commands import AgentRunner
from service.config.rollout import CommandConfig
from service.rollout.environment import Task

async def run(mark, script):
    runner = AgentRunner(CommandConfig(command=("sh", "-c", script), variables={"BATON_TEST_AGENT": mark}))
    await runner.run(Task("p", (), ""), "http://127.0.0.1:9/v1", "key", 0)

asyncio.run(run(*sys.argv[1:]))
"""
DETACHES = "setsid sh -c 'trap \"\" TERM; sleep 600 & sleep 600' & "


async def test_what_a_command_started_ends_when_its_generator_is_killed(folders: Path, left_over: LeftOver) -> None:
    mark = secrets.token_hex(8)
    command = [sys.executable, "-c", GENERATOR, mark, DETACHES + "sleep 600"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folders)}) as generator:
        try:
            async with asyncio.timeout(60):
                while len(processes_of(mark)) < 5:  # two shells, three sleeping programs
                    await asyncio.sleep(0.02)
        finally:
            generator.kill()
    assert left_over(MARK, mark, GONE_SECONDS) == {}
