"""A run that is stopped before Ray is up says so, in its folder too, and exits as one that was stopped later."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.driver import cluster
from actors.driver import run as running
from actors.driver.signals import FORCING, STOP_SIGNALS
from service.config import Config, load_config, resolved_yaml
from service.errors import RunFailed
from service.run.checkpoints import FileChecksum, Manifest
from service.run.folder import CONFIG
from service.run.preparing.inputs import Prepared
from service.run.records.writer import RunWriter
from tests.pure.forked import Forked
from tests.waiting import PAUSE, until


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def summary_in(runs: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((runs / "quickstart" / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_while_a_run_is_prepared_ends_it_in_order(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def slow(config: Config, path: Path) -> Prepared:
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError("the signal ends it")

    monkeypatch.setattr(running, "prepare", slow)
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    config = load_config(["configs/quickstart.yaml"], [f"run.dir={tmp_path}", "metrics.port=0"])
    assert running.run(config) == 128 + number
    assert capsys.readouterr().out.endswith("stopped before the first optimizer step\n")
    assert summary_in(tmp_path)["state"] == "stopped"


STUCK = """
import ctypes, os, signal, sys, threading
from actors.driver import signals

signals.STUCK_SECONDS = {grace}
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)


def give_up(number):
    print("gave up", flush=True)
    os._exit(128 + number)


with signals.when_stuck(give_up):
    print("begun", flush=True)
    {waiting}
"""


def waits(pid: int) -> bool:
    """Whether a process waits at several looks; at one look it may wait for Python's lock."""

    def look() -> bool:
        time.sleep(PAUSE)
        return psutil.Process(pid).status() == psutil.STATUS_SLEEPING

    return all(look() for _ in range(3))


@pytest.mark.parametrize(
    ("waiting", "grace", "printed", "code"),
    [
        ("libc.pthread_mutex_lock(lock) or libc.pthread_mutex_lock(lock)", 0.1, "gave up\n", 128 + signal.SIGTERM),
        ("threading.Event().wait()", 60, "", signal.SIGTERM),
    ],
    ids=["outside of Python", "in Python"],
)
def test_a_stop_signal_is_heard_where_the_main_thread_waits(
    waiting: str, grace: float, printed: str, code: int
) -> None:
    command = [sys.executable, "-c", STUCK.format(waiting=waiting, grace=grace)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            until(lambda: waits(process.pid))
            process.terminate()
            assert process.wait(60) == code
        finally:
            process.kill()
        assert process.stdout.read() == printed


def ready() -> None:
    """Nothing of a run is real but its signals, its folder and its end."""
    running.prepare = lambda config, path: Prepared(path, [], path, 8, None)  # type: ignore[arg-type]
    running.keep_token_private = lambda *words: None
    running.place_actors = lambda *words: None  # type: ignore[assignment,return-value]


def endless(folder: Path, blocked: int) -> int:
    """A run that goes on for a minute, whatever it is told."""

    class Coordinator:
        stopped_by = None

        def __init__(self, config: Config, cluster: object, folder: RunWriter, *rest: object) -> None:
            folder.step = 7

        def stop(self, number: int) -> None:
            time.sleep(blocked)

        async def run(self) -> None:
            print("begun", flush=True)
            await asyncio.sleep(60)

    ready()
    running.Coordinator = Coordinator  # type: ignore[assignment,misc]
    running.ray_session = lambda *words: nullcontext()
    settings = [f"run.dir={folder}", "metrics.port=0", "run.stop_grace=0.2"]
    return running.run(load_config(["configs/quickstart.yaml"], settings))


@pytest.mark.parametrize("blocked", [0, 60], ids=["the event loop runs", "the event loop is blocked"])
def test_a_stopped_run_that_does_not_end_in_time_is_ended_by_force(tmp_path: Path, blocked: int) -> None:
    with Forked(endless, tmp_path, blocked) as run:
        run.read_to("begun")
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 128 + signal.SIGTERM
        assert "run.stop_grace" in run.stdout.read()
    summary = summary_in(tmp_path)
    assert (summary["state"], summary["steps"]) == ("stopped", 7) and "ended by force" in summary["reason"]


def ends_ray(folder: Path, fails: bool) -> int:
    """A run that ends once it was told to; each line that it reads lets it end something more."""

    class Coordinator:
        stopped_by: int | None = None

        def __init__(self, *rest: object) -> None:
            self.stopping = asyncio.Event()

        def stop(self, number: int) -> None:
            self.stopped_by = number
            self.stopping.set()

        async def run(self) -> None:
            print("begun", flush=True)
            await self.stopping.wait()
            if fails:
                raise RunFailed("the disk is full")

    def shutdown() -> None:
        # Ray gives it the default action back, unknown to Python
        ctypes.CDLL(None).signal(signal.SIGTERM, 0)
        status, bit = Path("/proc/self/status"), 1 << signal.SIGTERM - 1
        while not any(int(line[7:], 16) & bit for line in status.read_text().splitlines() if line[:7] == "SigCgt:"):
            pass
        print("Ray ends", flush=True)
        sys.stdin.readline()

    ready()
    running.Coordinator = Coordinator  # type: ignore[assignment,misc]
    cluster.start_watchdog = lambda *words: None
    cluster.ray.init, cluster.ray.shutdown = lambda *words, **settings: None, shutdown
    try:
        code = running.run(load_config(["configs/quickstart.yaml"], [f"run.dir={folder}", "metrics.port=0"]))
    except RunFailed as failure:
        code = failure.exit_code
    print("Ray has ended", flush=True)
    sys.stdin.readline()
    return code


@pytest.fixture
def ending(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """A run that was stopped by SIGTERM and now ends Ray."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Forked(ends_ray, tmp_path, getattr(request, "param", False)) as run:
        run.read_to("begun")
        run.send_signal(signal.SIGTERM)
        run.read_to("Ray ends")
        yield run


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_second_stop_signal_while_ray_is_ended_is_answered_with_a_line_and_changes_nothing(
    ending: Forked, number: signal.Signals
) -> None:
    ending.send_signal(number)
    assert f"number {FORCING} " in ending.read_to("already stopping")
    ending.go_on()
    ending.read_to("Ray has ended")
    for _ in range(FORCING):
        ending.send_signal(number)
    ending.go_on()
    assert ending.wait() == 128 + signal.SIGTERM


def test_a_third_stop_signal_while_ray_is_ended_ends_the_run_by_force(ending: Forked, tmp_path: Path) -> None:
    ending.send_signal(signal.SIGTERM)
    ending.read_to("already stopping")
    ending.send_signal(signal.SIGINT)
    assert f"{FORCING} stop signals" in ending.read_to("ended by force")
    assert ending.wait() == 128 + signal.SIGINT
    summary = summary_in(tmp_path)
    assert summary["state"] == "stopped" and f"{FORCING} stop signals" in summary["reason"]


@pytest.mark.parametrize("ending", [True], indirect=True)
def test_a_second_stop_signal_while_a_failed_run_ends_ray_leaves_why_it_failed(ending: Forked, tmp_path: Path) -> None:
    ending.send_signal(signal.SIGTERM)
    ending.read_to("already stopping")
    ending.go_on()
    ending.go_on()
    assert ending.wait() == RunFailed.exit_code
    assert (summary_in(tmp_path)["state"], summary_in(tmp_path)["reason"]) == ("failed", "the disk is full")


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_goes_on_has_not_ended_and_is_stopped_with_the_steps_that_it_had(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    summary = tmp_path / "summary.json"
    summary.write_text('{"state": "stopped", "steps": 20}')

    def starting(config: Config, folder: RunWriter, *arguments: object) -> int:
        if goes_on:
            folder.begin(resolved_yaml(config))
            assert not summary.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "prepare", lambda config, path: Prepared(path, [], path, 8, None))
    monkeypatch.setattr(running, "check_checkpoint", lambda *what: None)
    monkeypatch.setattr(running, "_run_on_ray", starting)
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    config = load_config(["configs/quickstart.yaml"], ["metrics.port=0"])
    (tmp_path / CONFIG).write_text(resolved_yaml(config))
    manifest = Manifest(step=27, journal_position=0, files={"a part": FileChecksum(bytes=0, xxh3_64="")})
    assert running.run(config, tmp_path, manifest) == 128 + signal.SIGINT
    assert json.loads(summary.read_text()) == {"state": "stopped", "steps": 27 if goes_on else 20}


def test_an_interrupt_while_the_command_is_imported_is_no_traceback() -> None:
    code = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "service.cli.parser":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from service.cli import main
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
