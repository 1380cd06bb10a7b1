"""Hosts to run on, and runs on them, each watched."""

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import Driver, close
from tests.e2e.ledger_watch import LedgerWatch
from tests.hosts.bed import Bed, Host, unsupported

EVERY = 2
"""Optimizer steps between two checkpoints."""
SETTINGS = [
    f"trainer.checkpoint_every={EVERY}",
    "model.warm_start.steps=10",
    "metrics.port=0",
]


@dataclass(kw_only=True)
class Run(Driver):
    """A run on a bed."""

    bed: Bed

    def holder(self, part: str) -> str:
        """The host that holds a part, as the run said last."""
        lines = [line.split() for line in self.said if line.startswith("host ") and " is gone" not in line]
        address = next(
            words[1].rstrip(":") for words in reversed(lines) if part in [word.rstrip(",") for word in words]
        )
        return next(name for name, own in self.bed.addresses.items() if own == address)

    def goes_on_after(self, what: str, disturb: Callable[[], object], within: float) -> None:
        """It takes more further steps than lie between two checkpoints; says when its longest pause was over.

        A step that was under way at the disturbance may end before that pause.
        """
        began = last = over = time.monotonic()
        longest, before = 0.0, self.step()
        disturb()
        for step in range(before + 1, before + EVERY + 2):
            self.until_step(step)
            now = time.monotonic()
            if now - last > longest:
                longest, over = now - last, now
            last = now
        print(f"FIGURE {what}: {over - began:.0f} s to the next optimizer step")
        assert over - began < within


@pytest.fixture
def lay(tmp_path: Path) -> Iterator[Callable[[Sequence[Host]], Bed]]:
    """Makes a bed of these hosts; Ray is not started."""
    if (why := unsupported()) is not None:
        pytest.skip(why)
    with ExitStack() as beds:
        yield lambda hosts: beds.enter_context(Bed(tmp_path, hosts))


@pytest.fixture
def drive(tmp_path: Path, lay: object) -> Iterator[Callable[..., Run]]:
    """Starts quick starts on the hosts of a bed; ends what a failed test left running.

    At every scrape of each of them the token ledger has to close, and no accepted token may be lost.
    """
    runs: list[Run] = []
    watches: list[LedgerWatch] = []

    def start(bed: Bed, settings: list[str], host: str | None = None, **environment: str) -> Run:
        host = host or bed.head
        how = (
            [] if "--resume" in settings else ["--config", "configs/quickstart.yaml", f"run.dir={tmp_path}", *SETTINGS]
        )
        process = bed.popen(
            host,
            [sys.executable, "-m", "service", "run", *how, *settings],
            {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
            RAY_ADDRESS=bed.address,
            **environment,
        )
        runs.append(Run(process, secrets.token_hex(8), tmp_path / "quickstart", bed=bed))
        watches.append(LedgerWatch(tmp_path / "quickstart", partial(bed.enter_network, host)))
        return runs[-1]

    yield start
    close(runs, watches)
    assert [(watch.open, watch.lost) for watch in watches] == [([], []) for _ in watches], "the token ledger"
