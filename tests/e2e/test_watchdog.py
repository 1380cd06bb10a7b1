"""The watchdog ends what its driver leaves behind, however the driver died."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.engine import vllm_engine
from actors.watchdog import DEADLINE, NO_RAYLET, marked_processes
from tests.waiting import until

SECONDS = 4 * DEADLINE

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from actors.watchdog import MARK, start_watchdog
mark, folder = sys.argv[1], Path(sys.argv[2])
os.environ[MARK] = mark
start_watchdog(mark, folder)
subprocess.Popen(["sleep", "600"], start_new_session=True)
subprocess.Popen(["bash", "-c", "trap '' TERM; while true; do sleep 1; done"], start_new_session=True)
# Its child has lost the mark, as a process does that renames itself over its environment.
orphan = "env -u BATON_RUN_MARK sleep 600 & echo $! > $0/orphan; wait"
subprocess.Popen(["bash", "-c", orphan, str(folder.parent)], start_new_session=True)
while not (file := folder.parent / "orphan").exists() or not file.stat().st_size:
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


def lives(process: int) -> bool:
    """Whether the process is there and more than an entry that its parent has not read yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def opened(process: int) -> set[str]:
    """What a process has open, as far as it is still there."""
    with suppress(OSError):
        return {os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()}
    return set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_everything_that_carries_the_mark_is_gone_after_the_driver_died(tmp_path: Path, number: signal.Signals) -> None:
    mark, folder = f"test-{os.getpid()}-{number}", tmp_path / "ray"
    folder.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, mark, str(folder)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert driver.stdout is not None and driver.stdout.readline() == b"ready\n"
    # A process shows its mark only once it has replaced its parent's image.
    until(lambda: len(marked_processes(mark)) >= 2, SECONDS)

    os.killpg(driver.pid, number)
    driver.wait(timeout=SECONDS)
    driver.stdout.close()

    # The folder goes last.
    until(lambda: not marked_processes(mark) and not folder.exists(), SECONDS, lambda: marked_processes(mark))
    assert not lives(int((tmp_path / "orphan").read_text()))


def test_processes_of_another_run_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, "BATON_RUN_MARK": f"other-{os.getpid()}"})
    try:
        until(lambda: marked_processes(f"other-{os.getpid()}"), SECONDS)
        assert [process for process, _ in marked_processes(f"other-{os.getpid()}")] == [other.pid]
        assert marked_processes(f"othe-{os.getpid()}") == set()
    finally:
        other.kill()
        other.wait(timeout=SECONDS)


def test_a_process_with_a_name_that_is_no_text_does_not_hide_the_others() -> None:
    rename = "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, b'bad\\xff) 1'); print(flush=True); time.sleep(600)"
    mark = f"named-{os.getpid()}"
    odd = subprocess.Popen(
        [sys.executable, "-c", rename], env={**os.environ, "BATON_RUN_MARK": mark}, stdout=subprocess.PIPE
    )
    try:
        assert odd.stdout is not None and odd.stdout.readline()
        assert b"bad\xff) 1" in Path(f"/proc/{odd.pid}/stat").read_bytes()
        assert [process for process, _ in marked_processes(mark)] == [odd.pid]
    finally:
        odd.kill()
        odd.communicate()


def test_what_removes_an_engines_names_outlives_a_scan_that_saw_it_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_RUN_MARK", mark := f"tracked-{os.getpid()}")
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", None)
    vllm_engine._start_tracker.__wrapped__()
    end: Any = resource_tracker._resource_tracker._fd
    try:
        pipe = os.readlink(f"/proc/self/fd/{end}")
        (process,) = (each for each in psutil.pids() if each != os.getpid() and pipe in opened(each))
        start = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
        assert not marked_processes(mark, {(process, start)})
    finally:
        os.close(end)


WITHOUT_RAYLET = """
import sys, threading
from pathlib import Path
import numpy, psutil, ray
from actors.driver.ray_session import ray_session
from service.config import Config

def put() -> None:
    while True:
        ray.put(numpy.zeros(300_000))

with ray_session(Config(), sys.argv[1], failed=lambda reason: None, summary=Path(sys.argv[2])):
    (raylet,) = (each for each in psutil.Process().children(recursive=True) if each.name() == "raylet")
    if sys.argv[3] == "killed":
        threading.Thread(target=put, daemon=True).start()
    threading.Event().wait(3)  # calls of Ray are in progress; the watchdog has seen the raylet
    if sys.argv[3] == "killed":
        raylet.kill()
        threading.Event().wait(60)
"""


@pytest.mark.full
@pytest.mark.parametrize("how", ["killed", "in order"])
def test_a_driver_that_ray_ends_after_its_raylet_has_a_reason(tmp_path: Path, how: str) -> None:
    summary = tmp_path / "summary.json"
    driver = [sys.executable, "-c", WITHOUT_RAYLET, f"test-{os.getpid()}-{how[:2]}", str(summary), how]
    ended = subprocess.run(driver, stdout=subprocess.PIPE, text=True, timeout=120)  # until the watchdog has ended too
    assert ended.returncode == (how == "killed")
    assert summary.exists() == (NO_RAYLET in ended.stdout) == (how == "killed")
    assert how != "killed" or json.loads(summary.read_text())["reason"] == NO_RAYLET
