"""One Ray for all end-to-end tests of a session, and runs as a user starts them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors import RAY_ENV
from tests.e2e.ledger_watch import LedgerWatch
from tests.waiting import until

ROOT = Path(__file__).parents[2]
MARK = "BATON_TEST_RUN"
START_SECONDS = 300


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

    process: subprocess.Popen[str]
    mark: str
    folder: Path
    said: list[str]

    def until(self, words: str) -> str:
        """Read what the run prints up to the line that contains `words`, and return that."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_SECONDS
        for line in self.process.stdout:
            self.said.append(line)
            if words in line:
                return line
            assert time.monotonic() < deadline, "".join(self.said)
        raise AssertionError(f"the run ended before it said {words!r}:\n" + "".join(self.said))

    def step(self) -> int:
        """The optimizer step that the run's folder says was taken last."""
        file = self.folder / "metrics.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return int(json.loads(whole.splitlines()[-1])["trainer/global_step"]) if whole else 0

    def until_true(self, look: Callable[[], object]) -> None:
        """Wait for something that shows in the run's folder while it goes on."""
        until(lambda: look() or self.process.poll() is not None, START_SECONDS)
        if self.process.poll() is not None:
            self.end(0)
            raise AssertionError(f"the run ended:\n{''.join(self.said)}")

    def until_step(self, step: int) -> None:
        """Wait until the run has taken an optimizer step."""
        self.until_true(lambda: self.step() >= step)

    def end(self, seconds: float) -> int:
        """Read on to the end; the exit code."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.readlines()
        return self.process.wait(timeout=seconds)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts runs, each with a mark of its own in its environment; ends what a failed test left running.

    At every scrape of every one of them the token ledger has to close.
    """
    drivers: list[Driver] = []
    watches: list[LedgerWatch] = []

    def start(settings: list[str], recipe: str = "quickstart") -> Driver:
        mark = secrets.token_hex(8)
        how = [] if "--resume" in settings else ["--config", f"configs/{recipe}.yaml", f"run.dir={tmp_path}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "run", *how, *settings],
            cwd=ROOT,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        drivers.append(Driver(process, mark, tmp_path / recipe, []))
        watches.append(LedgerWatch(tmp_path / recipe))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.process.kill()
        driver.process.wait(timeout=10)
        if driver.process.stdout is not None:
            driver.process.stdout.close()
    for watch in watches:
        watch.stop()
    assert [watch.open for watch in watches] == [[] for _ in watches], "the token ledger does not close"
