"""All chaos runs, two at a time, then the pairs: `python -m tests.chaos`, which is `make test-chaos`.

A chaos run spends most of its time on processes that come back one after the other, each on one core, or on waiting
for Ray to notice a death; so two lanes of tests run beside each other. The runs of pairs need both cores. The exit
code is 1 where a test failed or the runs had fewer kills than they are meant to have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.conftest import FIGURES_FILE
from tests.chaos.theatre import ROOT, SEED, merge_figures

ROUNDS = (
    (["tests/chaos/test_kills.py"], ["tests/chaos/test_moments.py", "tests/chaos/test_disturbances.py"]),
    (["tests/chaos/test_pairs.py", "tests/chaos/test_out_of_memory.py"],),
)
"""The lanes that run beside each other, one round after the other."""
MIN_KILLS = 350
MAX_SECONDS = 6000.0


def main() -> int:
    """Run all rounds, and print what they say as they say it, and all figures at the end."""
    began, figures, codes = time.monotonic(), Counter[str](), list[int]()
    for lanes in ROUNDS:
        codes += run_beside(lanes, figures)
    seconds = time.monotonic() - began
    print(f"\nchaos: {seconds:.0f} s (at most {MAX_SECONDS:.0f} on two quiet cores), seed {SEED}")
    for what, count in sorted(figures.items()):
        print(f"{count:8d}  {what}")
    if figures["kills"] < MIN_KILLS:
        print(f"missed: {figures['kills']} kills, at least {MIN_KILLS} are meant")
    return int(any(codes) or figures["kills"] < MIN_KILLS)


def run_beside(lanes: Sequence[list[str]], figures: Counter[str]) -> list[int]:
    """Run lanes beside each other, and add up their figures; returns their exit codes."""
    with tempfile.TemporaryDirectory(prefix="chaos-figures-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(lanes))]
        started = [start(lane, file) for lane, file in zip(lanes, files, strict=True)]
        readers = [threading.Thread(target=relay, args=lane) for lane in enumerate(started)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        for file in files:
            if file.exists():
                merge_figures(figures, json.loads(file.read_text()))
        return [lane.wait() for lane in started]


def start(tests: list[str], figures: Path) -> subprocess.Popen[str]:
    """One lane in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-v", "--durations=0", "--durations-min=1", *tests],
        cwd=ROOT,
        env={**os.environ, FIGURES_FILE: str(figures), "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def relay(number: int, lane: subprocess.Popen[str]) -> None:
    """Print a lane's lines as they come."""
    assert lane.stdout is not None
    for line in lane.stdout:
        print(f"[{number}] {line}", end="", flush=True)
    lane.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
