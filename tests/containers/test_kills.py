"""configs/harbor_tiny.yaml in containers of podman, with and without kills: it learns, and no group is lost or doubled.

The lines of `metrics.jsonl` stay in `build/harbor_tiny`, for `python -m scripts.curves`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from baton.examples.harbor_tiny import make_tasks
from tests.conftest import wait_until_gone
from tests.containers.conftest import LEFT_SECONDS, podman
from tests.e2e.ledger_watch import LedgerWatch
from tests.e2e.verdict import judged, step_of
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".venv-harbor" / "bin" / "harbor"
KILLS = int(os.environ.get("BATON_KILLS", "20"))
VICTIMS = ("harbor serve", "container", "gateway", "buffer", "generator-0")
STEP_SECONDS = 1200.0
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs `make harbor`"),
]


def victim_pid(victim: str, run_folder: Path) -> int:
    """A process of the run; 0: there is none now."""
    if victim == "container":
        pids = [int(pid) for pid in podman("ps", "-q", "--format", "{{.Pid}}").split()]
        return random.choice(pids) if pids else 0
    name = "generator-0" if victim == "harbor serve" else victim
    file = run_folder / "logs" / f"{name}.log"
    found = re.findall(r"begins: process (\d+) ", file.read_text()) if file.exists() else []
    try:
        process = psutil.Process(int(found[-1])) if found else None
        if process is None or victim != "harbor serve":
            return process.pid if process is not None else 0
        return next((each.pid for each in process.children() if "serve" in each.cmdline()), 0)
    except psutil.NoSuchProcess:
        return 0


def strike(victim: str, run_folder: Path, run: subprocess.Popen[bytes]) -> bool:
    """Kill a process of the run as soon as there is one; False: the run ended before."""
    while run.poll() is None:
        with suppress(ProcessLookupError):  # it ended just now
            if pid := victim_pid(victim, run_folder):
                os.kill(pid, signal.SIGKILL)
                return True
        time.sleep(0.2)
    return False


@contextmanager
def started(image: str, tmp_path: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The run, which ends with the block."""
    make_tasks(tmp_path / "tasks", image)
    settings = [f"run.dir={tmp_path}", f"data.train={tmp_path / 'tasks'}", f"env.options.program={PROGRAM}"]
    settings += ["metrics.port=0", f"env.options.trials={tmp_path / 'trials'}"]
    settings += ["env.options.variables=LITELLM_LOCAL_MODEL_COST_MAP"]  # Harbor asks for prices otherwise
    words = [sys.executable, "-m", "service", "run", "--config", "configs/harbor_tiny.yaml", *settings, *more]
    given = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.Popen(words, cwd=ROOT, env=given, stdin=subprocess.DEVNULL)
    try:
        yield run
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.wait(300)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_or_killed_leaves_nothing(busybox: str, tmp_path: Path, number: signal.Signals) -> None:
    podman("tag", busybox, image := "example.org/busybox:1")  # podman-compose removes images of localhost
    with started(image, tmp_path, "env.options.environment=podman") as run:
        until(lambda: podman("ps", "-q") or run.poll() is not None, STEP_SECONDS)
        assert podman("network", "ls", "-q").count("\n") > 1
        run.send_signal(number)
        assert run.wait(STEP_SECONDS) in (128 + signal.SIGINT, -signal.SIGKILL)
    assert wait_until_gone("CONTAINERS_CONF", os.environ["CONTAINERS_CONF"], LEFT_SECONDS) == {}


@pytest.mark.parametrize("kills", [0, KILLS])
def test_tiny_tasks_are_learned_in_containers_with_and_without_kills(busybox: str, tmp_path: Path, kills: int) -> None:
    folder, kept = tmp_path / "harbor_tiny", ROOT / "build" / "harbor_tiny" / f"{kills}-kills.jsonl"
    began, struck, ledger = time.monotonic(), Counter[str](), LedgerWatch(folder)
    with started(busybox, tmp_path) as run, ExitStack() as stack:
        stack.callback(ledger.stop)
        steps = 24
        for number in range(kills):
            deadline, victim = time.monotonic() + STEP_SECONDS, VICTIMS[number % len(VICTIMS)]
            while step_of(folder) < 1 + number * (steps - 2) / kills and run.poll() is None:
                assert time.monotonic() < deadline, f"no step after {struck}"
                time.sleep(0.2)
            struck[victim] += strike(victim, folder, run)
            print(f"{time.monotonic() - began:6.0f} s, step {step_of(folder)}: {victim} killed", flush=True)
        assert run.wait(STEP_SECONDS * 3) == 0
    ended = time.monotonic()
    while podman("ps", "-aq") and time.monotonic() - ended < LEFT_SECONDS:
        time.sleep(1.0)
    print(f"{ended - began:.0f} s, killed: {dict(struck)}; containers for {time.monotonic() - ended:.0f} s more")
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "metrics.jsonl", kept)
    lines = judged(folder, steps)
    assert (ledger.open, ledger.lost, sum(struck.values())) == ([], [], kills) and ledger.scrapes
    rewards = [line["reward/avg_raw_reward"] for line in lines]
    assert sum(rewards[-4:]) / 4 - rewards[0] > 0.3, json.dumps(rewards)
    assert (podman("ps", "-aq"), podman("volume", "ls", "-q")) == ("", "")
