"""One Ray for all end-to-end tests of a session, and runs as a user starts them."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors import RAY_ENV
from tests.e2e.ledger_watch import LedgerWatch
from tests.e2e.verdict import lines_of, step_of

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
SHORT = [*QUICK, "run.max_steps=12", "trainer.checkpoint_every=6", "model.warm_start.steps=30", "weights.verify=true"]
ENDLESS = ["run.max_steps=100000", *QUICK]

LeftOver = Callable[[str, str, float], dict[int, str]]
"""The fixture `left_over`."""


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray  # reads its settings from the environment when it is imported, so `actors` has to come first

    assert RAY_ENV.keys() <= os.environ.keys()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@dataclass
class Driver:
    """A run under way."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path
    said: list[str] = field(default_factory=list)
    """Its lines so far."""
    _passed: int = 0
    """How many of them `until` has looked at."""
    _begun: bytes = b""
    """The line that it has not finished."""

    def until(self, words: str) -> str:
        """Read what the run prints up to the next line that contains `words`, and return that."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            for line in self.said[self._passed :]:
                self._passed += 1
                if words in line:
                    return line
            assert self._hear(PAUSE), f"the run ended before it said {words!r}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{WAIT_SECONDS} s without {words!r}; the run said:\n{self.tail()}"

    def step(self) -> int:
        """The optimizer step that the run's folder says was taken last."""
        return step_of(self.folder)

    def until_true(self, look: Callable[[], object], what: str = "what was waited for") -> None:
        """Wait for something that shows in the run's folder while it goes on."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not look():
            assert self._hear(PAUSE), f"the run ended before {what}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{WAIT_SECONDS} s without {what}; the run said:\n{self.tail()}"

    def until_step(self, step: int) -> None:
        """Wait until the run has taken an optimizer step."""
        self.until_true(lambda: self.step() >= step, f"step {step}")

    def end(self) -> int:
        """Read on to the end; the exit code. A run that goes on may take as long as it says something now and then."""
        heard, lines = time.monotonic(), len(self.said)
        while self._hear(PAUSE):
            if len(self.said) > lines:
                heard, lines = time.monotonic(), len(self.said)
            silent = time.monotonic() - heard
            assert silent < WAIT_SECONDS, f"no end and no word for {silent:.0f} s; the run said:\n{self.tail()}"
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

    def _hear(self, seconds: float) -> bool:
        """Read on for so long, or for what there is; False when the run has ended and said everything."""
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        ended = self.process.poll() is not None
        if not select.select([out], [], [], seconds)[0]:
            return not ended
        heard = os.read(out, 1 << 16)
        *lines, self._begun = (self._begun + heard).split(b"\n")
        self.said += [line.decode(errors="replace") + "\n" for line in lines]
        if not heard and self._begun:
            self.said.append(self._begun.decode(errors="replace"))
            self._begun = b""
        return bool(heard)


def close(drivers: Sequence[Driver], watches: Sequence[LedgerWatch]) -> None:
    """End what a failed test left running, and say what it said."""
    for driver in drivers:
        print(driver.tail())
        driver.process.kill()
        driver.process.wait(timeout=10)
        if driver.process.stdout is not None:
            driver.process.stdout.close()
    for watch in watches:
        watch.stop()


Drive = Callable[..., Driver]
"""Starts a run; see `driving`."""


@contextmanager
def driving(runs: Path) -> Iterator[Drive]:
    """Starts runs, each with a mark of its own in its environment; ends what a failed test left running.

    At every scrape of every one of them the token ledger has to close.
    """
    drivers: list[Driver] = []
    watches: list[LedgerWatch] = []

    def start(settings: list[str], recipe: str = "quickstart") -> Driver:
        mark = secrets.token_hex(8)
        how = [] if "--resume" in settings else ["--config", f"configs/{recipe}.yaml", f"run.dir={runs}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "run", *how, *settings],
            cwd=ROOT,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        drivers.append(Driver(process, mark, runs / recipe))
        watches.append(LedgerWatch(runs / recipe))
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
