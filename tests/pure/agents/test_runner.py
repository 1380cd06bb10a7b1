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
from aiohttp import web

from service.agents.runner.command_process import Finished
from service.agents.runner.runner import FOLDERS, AgentRunner
from service.agents.runner.sandbox import KERNEL, PID_MAX_OF_NAMESPACES, namespaces_refused
from service.config.command import OWN_VARIABLES, CommandConfig
from service.rollout.child_process import STARTED_SECONDS
from service.rollout.environment import Message, Task

HERE = "tests.pure.agents.scores"
KEY = "sk-of-this-session"
MARK = "BATON_TEST_AGENT"
"""Environment variable of the commands of one test."""
NO_ENDPOINT = "http://127.0.0.1:9/s/1/v1"
GONE_SECONDS = 60.0

LeftOver = Callable[[str, str, float], dict[int, str]]

REFUSED = namespaces_refused()
namespaced = pytest.mark.skipif(bool(REFUSED), reason=REFUSED)


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


@asynccontextmanager
async def endpoint() -> AsyncIterator[str]:
    """The address of a server that answers with the path and the key of a request."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([request.path, request.headers["authorization"], len(await request.read())])

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{path:.*}", answer)
    serving = web.AppRunner(app)
    await serving.setup()
    await web.TCPSite(serving, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{serving.addresses[0][1]}/s/7/v1"
    finally:
        await serving.cleanup()


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


CALLS = """
import json, os, urllib.request
for base, body in ((os.environ["OPENAI_BASE_URL"], b"x"), (os.environ["ANTHROPIC_BASE_URL"], b"x" * (1 << 22))):
    headers = {"Authorization": "Bearer " + os.environ["ANTHROPIC_API_KEY"]}
    print(urllib.request.urlopen(urllib.request.Request(base + "/x", body, headers)).read().decode())
"""


@pytest.mark.parametrize("network", ["endpoint", "open"])
async def test_a_command_reaches_its_endpoint_and_its_key_stays_out_of_the_transcript(network: str) -> None:
    async with endpoint() as base_url, runner_of(CALLS, network=network) as runner:
        for _ in range(2):
            got = await runner.run(task(), base_url, KEY, 0)
            assert got.transcript == '["/s/7/v1/x", "Bearer [key]", 1]\n["/s/7/x", "Bearer [key]", 4194304]\n'


@namespaced
async def test_a_command_reaches_no_other_server_and_no_other_process() -> None:
    script = (
        "import os, socket, sys\n"
        "for port in sys.argv[1:]:\n"
        "    try: socket.create_connection(('127.0.0.1', port)); print('connected')\n"
        "    except ConnectionRefusedError: print('refused')\n"
        "try: os.kill(-1, 0)  # only asks: a signal would end all processes of the user where the sandbox fails\n"
        "except ProcessLookupError: print('alone')\n"
        "try: open('/proc/1/environ').read()\n"
        "except PermissionError: print('hidden')\n"
    )
    async with endpoint() as base_url, endpoint() as other:
        ports = [url.split(":")[2].split("/")[0] for url in (base_url, other)]
        async with runner_of(script, *ports) as runner:
            got = await runner.run(task(), base_url, KEY, 0)
    assert got.transcript == "connected\nrefused\nalone\nhidden\n"


async def test_a_command_gets_no_environment_variable_of_baton_but_those_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    got = await finished("import os; print(*sorted(os.environ))", variables={"MODE": "{seed}"})
    expected = {*OWN_VARIABLES, "BATON_SEED", "HOME", "LANG", "MODE", "PATH", "TMPDIR"}
    assert expected == {*got.transcript.split()} - {"LC_CTYPE"}  # Python's own


SLEEP = "import time; time.sleep(60)"
HOSTILE = {
    "is silent for ever": (SLEEP, {"seconds": 2.0}, "ended at limits.seconds"),
    "ignores SIGTERM": (
        "import signal; signal.signal(15, signal.SIG_IGN);" + SLEEP,
        {"seconds": 2.0},
        "limits.seconds",
    ),
    "floods its output": ("while True: print('x' * 4096)", {"output_bytes": 1 << 20}, "limits.output_bytes"),
    "floods and ends": ("print('x' * (1 << 21))", {"output_bytes": 1 << 20}, "limits.output_bytes"),
    "writes a huge sparse file": ("open('f', 'w').truncate(1 << 40)", {"file_bytes": 1 << 20}, "exit code was 1"),
    "dies of a huge file": (
        "import os, signal; signal.signal(25, 0); os.execvp('dd', ['dd', 'if=/dev/zero', 'of=f', 'bs=2M', 'count=1'])",
        {"file_bytes": 1 << 20},
        "signal 25",
    ),
    "fills its folder": (
        "[open(f'{i}', 'w').write('x') for i in range(500)];" + SLEEP,
        {"folder_bytes": 1 << 20},
        "limits.folder_bytes",
    ),
    "fills a file without a name": (
        "import os; f = open('f', 'wb'); os.remove('f'); f.write(b'x' * (1 << 22)); f.flush();" + SLEEP,
        {"folder_bytes": 1 << 20},
        "limits.folder_bytes",
    ),
    "fills its folder and ends": (
        "[open(f'{i}', 'w').write('x') for i in range(500)]",
        {"folder_bytes": 1 << 20},
        "limits.folder_bytes",
    ),
    "takes all memory": ("x = b'x' * (1 << 28);" + SLEEP, {"memory_bytes": 1 << 27}, "limits.memory_bytes"),
    "takes all memory in parts": (
        "import os; [os.fork() for _ in range(3)]; x = bytearray(b'x') * (1 << 26);" + SLEEP,
        {"memory_bytes": 1 << 28},
        "limits.memory_bytes",
    ),
    "fills files in memory without a name": (
        "import os; f = os.memfd_create('f'); [os.write(f, bytes(1 << 20)) for _ in range(200)];" + SLEEP,
        {"memory_bytes": 1 << 27},
        "limits.memory_bytes",
    ),
    "fills memory that its processes could share": (
        "import mmap; m = mmap.mmap(-1, 1 << 28); m.write(b'x' * (1 << 28));" + SLEEP,
        {"memory_bytes": 1 << 27},
        "limits.memory_bytes",
    ),
    "starts many threads": (
        "import threading as t, time; [t.Thread(target=time.sleep, args=(600,)).start() for _ in range(60)];" + SLEEP,
        {"processes": 40},
        "limits.processes",
    ),
    "starts many processes": (
        "import subprocess, sys; [subprocess.Popen(['sleep', '600']) for _ in range(60)];" + SLEEP,
        {"processes": 40},
        "limits.processes",
    ),
    "fails": ("raise SystemExit(3)", {}, "exit code was 3"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", {}, "signal 9"),
    "deletes its folder": ("import os, shutil; shutil.rmtree(os.getcwd())", {}, "it removed its folder"),
    "puts a link in the place of its folder": (
        "import os, shutil; home = os.environ['HOME']; shutil.rmtree(home); os.symlink('/etc', home)",
        {},
        "it replaced its folder",
    ),
    "replaces its folder": (
        "import os; os.rename(os.getcwd(), '../other'); os.symlink('/', os.environ['HOME'])",
        {},
        "it replaced its folder",
    ),
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
        "import os, subprocess, sys\n"
        "subprocess.Popen(['setsid', 'sh', '-c', 'trap \"\" TERM; sleep 600 & sleep 600'], stdout=2, stderr=2)\n"
        "os.close(1); os.close(2)\n"
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
        "for _ in range(2000): os.mkdir('deeper'); os.chdir('deeper')\n"
    )
    got = await finished(script, limits={"folder_bytes": 1 << 30})
    assert "limits.folder_bytes" in got.reason  # what lies deeper than a path is long cannot be measured
    assert (kept / "file").read_text() == "x" and list(folders.iterdir()) == []


RESERVES = "import mmap; r = mmap.mmap(-1, 1 << 36, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ);"
SHARES = (
    "import os; x = b'x' * (60 << 20); m = mmap.mmap(-1, len(x)); m.write(x); [os.fork() for _ in (1, 2, 3)]; m[::9];"
)


async def test_memory_that_a_command_only_reserves_or_that_its_processes_share_counts_once() -> None:
    got = await finished(RESERVES + SHARES + "import time; time.sleep(1.5)", limits={"memory_bytes": 1 << 28})
    assert (got.status, got.reason) == ("ok", "")


@namespaced
async def test_a_command_has_a_shared_memory_of_its_own_which_is_bounded_and_counted(tmp_path: Path) -> None:
    fills = "f = open('/dev/shm/of-a-command', 'wb'); [f.write(bytes(1 << 20)) or f.flush() for _ in range({})];"
    script = "import os; print(os.listdir('/dev/shm'), flush=True);" + fills + "{}"
    for megabytes, then, reason in (
        (200, "", "its exit code was 1"),  # the file system is as large as the limit
        (100, "x = b'x' * (60 << 20);" + SLEEP, "limits.memory_bytes"),
    ):
        got = await finished(script.format(megabytes, then), limits={"memory_bytes": 1 << 27})
        assert reason in got.reason
        assert got.transcript.startswith("[]\n") and not Path("/dev/shm/of-a-command").exists()


@pytest.mark.parametrize(
    "hides",
    [
        "libc.prctl(15, b'\\xff\\xfe', 0, 0, 0); x = b'x' * (200 << 20);",
        pytest.param(
            "place = os.getcwdb() + b'/\\xff \\xc3\\xa9\\r'; os.mkdir(place);"
            "assert libc.mount(b'tmpfs', place, b'tmpfs', 0, None) == 0;"
            "f = open(place + b'/f', 'wb'); [f.write(bytes(1 << 20)) for _ in range(200)];",
            marks=[namespaced, pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")],
        ),
    ],
    ids=["process", "mount"],
)
async def test_no_name_that_a_command_chooses_hides_what_it_uses(hides: str) -> None:
    script = f"import ctypes, os; libc = ctypes.CDLL(None); {hides} {SLEEP}"
    got = await finished(script, limits={"memory_bytes": 1 << 27, "folder_bytes": 1 << 30})
    assert "limits.memory_bytes" in got.reason, (got.reason, got.transcript)


BLIND = """
import asyncio, os
from pathlib import Path
from service.agents.runner.bounded import run_command
from service.agents.runner.sandbox import Launch
from service.agents.runner.usage import Processes
from service.config.command import CommandConfig

def memory(*given):
    raise RuntimeError("a bug of the watch")

Processes.memory = memory
limits = CommandConfig(command=("sleep", "60")).limits.model_dump()
launch = Launch(("sleep", "60"), Path.cwd(), Path(os.devnull), {"PATH": os.defpath}, limits, None)
asyncio.run(run_command(launch, "seconds", Path.cwd(), "", namespaces=False))
"""


def test_a_command_that_nobody_can_watch_is_ended_with_the_error(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", BLIND], cwd=tmp_path, stderr=subprocess.PIPE, timeout=50, check=False)
    assert ended.returncode == 1 and b"RuntimeError: a bug of the watch" in ended.stderr


@pytest.mark.skipif(bool(REFUSED) or KERNEL < PID_MAX_OF_NAMESPACES, reason="nothing bounds the processes of root")
async def test_a_fork_bomb_ends_at_once_with_its_limit_as_the_reason_and_is_not_scored() -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    largest_id = Path("/proc/sys/kernel/pid_max").read_text()
    async with runner_of(bomb, limits={"processes": 40, "seconds": 3.0}, score=f"{HERE}:length") as runner:
        async with asyncio.timeout(3.0 + 2.0 + STARTED_SECONDS):
            got = await runner.run(task(), NO_ENDPOINT, KEY, 0)
        assert (got.status, got.reward, got.info["seconds"] < 3.0 + 2.0) == ("failed", None, True)
        assert "limits.processes (40)" in got.reason
    assert Path("/proc/sys/kernel/pid_max").read_text() == largest_id


async def test_a_transcript_is_text_and_the_middle_of_a_long_one_is_left_out() -> None:
    script = "import sys; sys.stdout.buffer.write(b'\\xff\\x00' + b'a' * 5000 + b'end')"
    got = await finished(script, limits={"transcript_characters": 400}, score=f"{HERE}:length")
    assert got.reward == 5005.0
    assert got.transcript.startswith("\ufffd\x00aaa") and got.transcript.endswith("aaend")
    assert "[4605 characters left out]" in got.transcript


@pytest.mark.parametrize(
    ("score", "reward", "reason"),
    [
        (("sh", "-c", "echo checked; echo 0.25; echo"), 0.25, ""),
        (("sh", "-c", "echo 7 passed"), 1.0, ""),
        (("sh", "-c", "echo 1; exit 2"), 0.0, ""),
        (("sh", "-c", 'grep -q \'"ground_truth": "9"\' && test -e here'), 1.0, ""),
        (("sh", "-c", "echo nan"), None, "its score is nan"),
        (("sh", "-c", "kill -9 $$"), None, "its score failed: it was ended by signal 9"),
        (("sleep", "600"), None, "its score failed: it was ended at limits.score_seconds (2)"),
        (f"{HERE}:hangs", None, "hangs was ended at limits.score_seconds (2)"),
        (("no-such-command",), None, "no-such-command: No such file"),
        (f"{HERE}:nan", None, "its score is nan"),
        (f"{HERE}:answered", None, "FileNotFoundError"),
        (f"{HERE}:missing", None, "AttributeError"),
        ("no_such_module:score", None, "No module named 'no_such_module'"),
    ],
)
async def test_a_command_or_a_function_scores(score: Any, reward: float | None, reason: str) -> None:
    limits = {"score_seconds": 2.0 if "limits.score_seconds" in reason else 60.0}
    got = await finished("open('here', 'w')", of=task(answer="9"), score=score, limits=limits)
    assert (got.reward, got.status) == (reward, "ok" if reason == "" else "failed")
    assert reason in got.reason


async def test_a_function_that_returns_much_too_late_ends_with_its_process(
    monkeypatch: pytest.MonkeyPatch, folders: Path
) -> None:
    monkeypatch.setattr("service.agents.runner.runner.AROUND_SECONDS", 3.0)
    got = await finished("", score=f"{HERE}:never_ends", limits={"seconds": 1.0, "score_seconds": 0.1})
    assert (got.status, got.reason) == ("failed", "there was no score after 4.1 s")
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        (task(files={"../escaped": "x"}), {}, "is outside of the folder"),
        (task(files={"/tmp/escaped": "x"}), {}, "is outside of the folder"),
        (task(files={"out/escaped": "x"}), {"workdir": "template"}, "is outside of the folder"),
        (task(files={"loop/x": "x"}), {"workdir": "template"}, "its folder cannot be made"),
        (task(files=["a"]), {}, "are no texts by path"),
        (task(files={"a": 1}), {}, "are no texts by path"),
        (task(files={"a": "x", "a/b": "x"}), {}, "its folder cannot be made"),
        (task(), {"workdir": "missing"}, "its folder cannot be made"),
        (task(), {"command": ("no-such-command", "{prompt}")}, "no-such-command: No such file or directory"),
        (task("x" * 200_000), {"command": ("echo", "{prompt}")}, "echo: Argument list too long"),
        (task("a\0b"), {"command": ("echo", "{prompt}")}, "echo: embedded null byte"),
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
        (left,) = folders.iterdir()
        assert [path.name for path in left.iterdir()] == [".lock"]


def processes_of(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


GENERATOR = """
import asyncio, sys, logging
from service.agents.runner.runner import AgentRunner
from service.config.command import CommandConfig
from service.rollout.environment import Task

async def run(mark, script, runs):
    runner = AgentRunner(CommandConfig(command=("sh", "-c", script), variables={"BATON_TEST_AGENT": mark}))
    for _ in range(int(runs)):
        print(await runner.run(Task("p", (), ""), "http://127.0.0.1:9/v1", "key", 0), flush=True)
    await runner.close()

asyncio.run(run(*sys.argv[1:]))
"""
WITHOUT_NAMESPACES = ("unshare", "--user", "--map-root-user", "sh", "-c")
NONE_LEFT = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
DETACHES = "setsid sh -c 'trap \"\" TERM; sleep 600 & sleep 600' & "


@pytest.mark.parametrize("prefix", [(), pytest.param((*WITHOUT_NAMESPACES, NONE_LEFT), marks=namespaced)])
async def test_what_a_command_started_ends_when_its_generator_is_killed(
    prefix: tuple[str, ...], folders: Path, left_over: LeftOver
) -> None:
    mark = secrets.token_hex(8)
    command = [*prefix, sys.executable, "-c", GENERATOR, mark, DETACHES + "sleep 600", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(folders)}) as generator:
        try:
            async with asyncio.timeout(60):
                while len(processes_of(mark)) < 5:  # three shells, two sleeping programs of the detached ones
                    await asyncio.sleep(0.02)
        finally:
            generator.kill()
    assert left_over(MARK, mark, GONE_SECONDS) == {}
    assert [path.name.startswith(FOLDERS) for path in folders.iterdir()] == [True]
    async with runner_of("") as runner:  # another generator removes what the killed one left
        await runner.run(task(), NO_ENDPOINT, KEY, 0)
        assert len(list(folders.iterdir())) == 1
    assert list(folders.iterdir()) == []


@namespaced
def test_without_namespaces_commands_run_and_end_as_well_and_a_warning_says_so_once(left_over: LeftOver) -> None:
    mark = secrets.token_hex(8)
    command = [
        *WITHOUT_NAMESPACES,
        NONE_LEFT,
        sys.executable,
        "-c",
        GENERATOR,
        mark,
        DETACHES + "echo $OPENAI_BASE_URL",
    ]
    done = subprocess.run([*command, "2"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("transcript='http://127.0.0.1:9/v1\\n'") == 2
    assert done.stderr.count("without namespaces, which this machine refuses (no namespaces: No space left") == 1
    assert left_over(MARK, mark, 0.0) == {}
