"""One Ray for all end-to-end tests of a session, and runs as a user starts them."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.own_environment import own_ray
from tests.conftest import processes_with
from tests.e2e.ledger_watch import LedgerWatch
from tests.e2e.verdict import lines_of, step_of
from tests.slowest import COMMITTED, read_seconds

ROOT = Path(__file__).parents[2]
MARK = "BATON_TEST_RUN"
WAIT_SECONDS = 900
"""For what a run does next: starting, or bringing a dead part back, takes minutes on a loaded machine."""
LAST_SECONDS = 60
"""From a run's last word to its end."""
PAUSE = 0.05
"""Seconds between two looks."""
TAIL_LINES = 80
"""Of a run, in what a failed test says."""
QUICK = ["model.warm_start.steps=10", "metrics.port=0"]
"""Settings of a quick start that soon begins to train."""
SHORT = [*QUICK, "run.max_steps=8", "trainer.checkpoint_every=4", "weights.verify=true"]
ENDLESS = ["run.max_steps=100000", *QUICK]

Found = TypeVar("Found")
LeftOver = Callable[[str, str, float], dict[int, str]]
"""The fixture `left_over`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that two processes end at about the same time."""
    seconds = {ROOT / name: took for name, took in read_seconds(COMMITTED).items()}
    items.sort(key=lambda item: -seconds.get(item.path, 0.0))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder, own_ray(folder, num_cpus=8):
        yield


@dataclass
class Driver:
    """A run under way."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path
    said: list[str] = field(default_factory=list)
    """Its lines so far."""
    is_closed: bool = False
    """Whether what it says further is no longer read."""
    _passed: int = 0
    """How many of its lines `until` has looked at."""
    _heard: int = 0

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.said.append(line.decode(errors="replace"))
                if self.is_closed:
                    return

    def until(self, words: str) -> str:
        """Read what the run prints up to the next line that contains `words`, and return that."""

        def found() -> str:
            for line in self.said[self._passed :]:
                self._passed += 1
                if words in line:
                    return line
            return ""

        return self.until_true(found, repr(words))

    def until_true(self, look: Callable[[], Found], what: str = "what was waited for") -> Found:
        """Wait for something that shows in the run's folder while it goes on."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := look()):
            assert self._hear(), f"the run ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{WAIT_SECONDS} s without {what}; the run said:\n{self.tail()}"
        return found

    def step(self) -> int:
        """The optimizer step that the run's folder says was taken last."""
        return step_of(self.folder)

    def until_step(self, step: int) -> None:
        """Wait until the run has taken an optimizer step."""
        self.until_true(lambda: self.step() >= step, f"step {step}")

    def end(self) -> int:
        """Read on to the end; the exit code. A run that goes on may take as long as it says something now and then."""
        deadline, lines = time.monotonic() + WAIT_SECONDS, len(self.said)
        while self._hear():
            if len(self.said) > lines:
                deadline, lines = time.monotonic() + WAIT_SECONDS, len(self.said)
            assert time.monotonic() < deadline, f"no word for {WAIT_SECONDS} s; the run said:\n{self.tail()}"
        return self.process.wait(LAST_SECONDS)

    def finish(self) -> None:
        """Read on to the end, which has to be a good one."""
        assert self.end() == 0, self.tail()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the run to end, wherever in a step it is; it ends with the signal's code."""
        self.process.send_signal(number)
        assert self.end() == 128 + number, self.tail()

    def kill(self) -> None:
        """kill -9 the driver."""
        self.process.kill()
        assert self.process.wait(timeout=60) == -signal.SIGKILL

    def kill_part(self, title: str, chosen: Callable[[list[int]], int] = min) -> None:
        """kill -9 a process of the run whose title contains the words, by default the first."""
        mine = [process for process, words in processes_with(MARK, self.mark).items() if title in words]
        assert mine, f"the run has no process {title!r}"
        os.kill(chosen(mine), signal.SIGKILL)

    def lines(self) -> list[dict[str, Any]]:
        """Those of `metrics.jsonl`, one of each optimizer step."""
        return lines_of(self.folder)

    def summary(self) -> dict[str, Any]:
        """What the run wrote at its end."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def tail(self) -> str:
        """The last of what the run said."""
        return "".join(self.said[-TAIL_LINES:])

    def _hear(self) -> bool:
        """Wait a moment; False when the run has ended and said everything."""
        ended = self.process.poll() is not None
        self._reader.join(1.0 if ended else PAUSE)
        heard, self._heard = self._heard, len(self.said)
        return not ended or self._heard > heard


def close(drivers: Sequence[Driver], watches: Sequence[LedgerWatch]) -> None:
    """End what a failed test left running, and say what it said."""
    for driver in drivers:
        print(driver.tail())
        driver.process.kill()
        driver.process.wait(timeout=10)
    for watch in watches:
        watch.stop()


def folder_of(words: Sequence[str], default: Path) -> Path:
    """The folder of a run with these settings."""
    own = dict(word.split("=", 1) for word in words if word.startswith(("run.dir=", "run.name=")))
    if "--resume" in words and not own and (folder := Path(words[words.index("--resume") + 1])).is_dir():
        return folder
    return Path(own.get("run.dir", default.parent)) / own.get("run.name", default.name)


Drive = Callable[..., Driver]
"""Starts a run; see `driving`."""


@contextmanager
def driving(runs: Path) -> Iterator[Drive]:
    """Starts runs, or other commands, each with a mark of its own in its environment; ends what a failed test left.

    At every scrape of every one of them the token ledger has to close.
    """
    drivers: list[Driver] = []
    watches: list[LedgerWatch] = []

    def start(words: list[str], recipe: str = "quickstart", command: str = "run", **environment: str) -> Driver:
        new = command == "run" and "--resume" not in words
        how = ["--config", f"configs/{recipe}.yaml", f"run.dir={runs}"] if new else []
        mark = secrets.token_hex(8)
        process = subprocess.Popen(
            [sys.executable, "-m", "service", command, *how, *words],
            cwd=ROOT,
            env={**os.environ, MARK: mark, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        drivers.append(Driver(process, mark, folder_of(words, runs / recipe)))
        watches.append(LedgerWatch(drivers[-1].folder))
        return drivers[-1]

    try:
        yield start
    finally:
        close(drivers, watches)
    assert [watch.open for watch in watches] == [[] for _ in watches], "the token ledger does not close"


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """See `driving`."""
    with driving(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """One short quick start that has ended, for all who only look at what it left."""
    with driving(tmp_path_factory.mktemp("finished")) as start:
        run = start(SHORT)
        run.finish()
        yield run
