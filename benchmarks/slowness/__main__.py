"""Real runs in which one part becomes slow: does `baton status` name what binds within a minute?

    python -m benchmarks.slowness                       # five runs: environment, journal, weights, an engine, a rank
    python -m benchmarks.slowness --only journal weights

Each run is the quick start with two engines and two ranks. At first it is healthy: what binds must then be engines,
trainer or lookahead. Then one part becomes slow, and the run has `WITHIN` seconds to name it. An engine or a rank is
slowed by stopping its process most of the time, every other part by a pause in its calls.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from service.cli.status import run_status
from service.errors import UserError
from service.plan.binding import Part

ROOT = Path(__file__).parents[2]
HEALTHY_SECONDS = 45.0
"""Seconds of training before a part becomes slow."""
WITHIN = 60.0
START_SECONDS = 300.0
LOOK = 1.0
STOPPED, GOING = 0.27, 0.03
"""Seconds for which a slow process is stopped, and seconds for which it then runs, in turn."""
USUAL = {Part.ENGINES, Part.TRAINER, Part.LOOKAHEAD}
SETTINGS = (
    "run.max_steps=100000",
    "run.name=slow",
    "data.eval_every=0",
    "trainer.checkpoint_every=0",
    "model.warm_start.steps=20",
    "generator.engines=2",
    "metrics.port=0",
    "env.name=benchmarks.slowness.lookup:SlowLookup",
    "env.trusted_modules=[benchmarks.slowness.lookup]",
)
PAUSES = {Part.ENVIRONMENT: 1.0, Part.JOURNAL: 0.5, Part.WEIGHTS: 2.0}
"""Seconds by which each call of the part takes longer."""
PROCESSES = {Part.ENGINES: "VLLM::", Part.TRAINER: "ray::TrainerRank"}
"""Beginning of the title of the part's processes, one of which becomes slow."""


class Run:
    """A quick start in progress."""

    def __init__(self, parent: Path) -> None:
        self.slow, self.folder = parent / "slow_parts", parent / "slow"
        self.slow.mkdir()
        paths = os.pathsep.join([str(ROOT / "benchmarks/slowness/site"), str(ROOT)])
        words = ["run", "--config", str(ROOT / "configs/quickstart.yaml"), f"run.dir={parent}", *SETTINGS]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service", *words],
            env={**os.environ, "PYTHONPATH": paths, "BATON_SLOW": str(self.slow)},
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
        )

    def binding(self) -> dict[str, Any] | None:
        """What binds according to the run's status; None while the status does not say."""
        if self.process.poll() is not None:
            raise SystemExit(f"baton run ended with exit code {self.process.returncode}")
        try:
            return run_status(str(self.folder)).get("binding")
        except UserError:  # it is starting
            return None

    def until(self, accepts: Callable[[dict[str, Any]], bool], seconds: float) -> tuple[float, dict[str, Any] | None]:
        """Read the status until what binds is accepted or the time is over; returns the seconds until then, and what
        bound last."""
        began, found = time.monotonic(), None
        while time.monotonic() < began + seconds:
            found = self.binding() or found
            if found is not None and accepts(found):
                break
            time.sleep(LOOK)
        return time.monotonic() - began, found

    def one_of(self, title: str) -> int:
        """The process id of the last process of a kind.

        Raises:
            SystemExit: there is no such process.
        """
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [child.pid for child in children if " ".join(child.cmdline()).startswith(title)]
        if not found:
            raise SystemExit(f"no process of the run has a title that begins with {title}")
        return max(found)

    def end(self) -> None:
        """End the run as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def slow_process(pid: int) -> Iterator[None]:
    """Within the block, a process is stopped most of the time."""
    over = Event()

    def stutter() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(STOPPED)
            os.kill(pid, signal.SIGCONT)
            over.wait(GOING)

    thread = Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def slow_calls(run: Run, part: Part) -> Iterator[None]:
    """Within the block, every call of a part takes longer."""
    file = run.slow / part
    file.write_text(str(PAUSES[part]))
    try:
        yield
    finally:
        file.unlink()


def case(part: Part) -> bool:
    """Run healthily, then with a slow part. Prints what the status said; returns whether it was right both times."""
    with tempfile.TemporaryDirectory(prefix="slowness", ignore_cleanup_errors=True) as made:
        run = Run(Path(made))
        try:
            run.until(lambda _: True, START_SECONDS)
            _, healthy = run.until(lambda found: found["part"] not in USUAL, HEALTHY_SECONDS)
            how = slow_calls(run, part) if part in PAUSES else slow_process(run.one_of(PROCESSES[part]))
            with how:
                seconds, slow = run.until(lambda found: _names(part, found), WITHIN)
        finally:
            run.end()
    right = healthy is not None and healthy["part"] in USUAL, slow is not None and _names(part, slow)
    for state, found, is_right in zip(
        ("healthy", f"slow {part}, {seconds:.0f} s"), (healthy, slow), right, strict=True
    ):
        print(f"{state}: {'right' if is_right else 'WRONG'}: {found and found['sentence']}", flush=True)
    return all(right)


def _names(part: Part, found: dict[str, Any]) -> bool:
    """Whether what binds is the part. Engines may bind in a healthy run too, so the sentence about them must also name
    the slow engine."""
    one = {Part.ENGINES: "samples", Part.TRAINER: ""}.get(part, "")
    return found["part"] == part and one in found["sentence"]


def main() -> int:
    """Run the cases; returns 1 if the status was wrong in one of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slowness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*PAUSES, *PROCESSES]
    parser.add_argument(
        "--only", nargs="+", choices=[str(part) for part in every], default=[str(each) for each in every]
    )
    results = [case(Part(name)) for name in parser.parse_args().only]
    print(f"{sum(results)} of {len(results)} right")
    return int(not all(results))


if __name__ == "__main__":
    raise SystemExit(main())
