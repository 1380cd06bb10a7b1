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
import time
from collections import Counter
from pathlib import Path

from tests.chaos.conftest import FIGURES_FILE
from tests.chaos.theatre import ROOT, SEED

ROUNDS = ((("kills",), ("moments", "disturbances")), (("pairs", "out_of_memory"),))
"""The lanes of tests that run beside each other, one round after the other."""
MIN_KILLS = 350
MAX_SECONDS = 6000.0


def main() -> int:
    """Run all rounds, and print all figures at the end."""
    began, figures, failed = time.monotonic(), Counter[str](), False
    with tempfile.TemporaryDirectory(prefix="chaos-figures-") as folder:
        for lanes in ROUNDS:
            started = []
            for lane in lanes:
                files = [f"tests/chaos/test_{name}.py" for name in lane]
                env = {**os.environ, FIGURES_FILE: f"{folder}/{lane[0]}.json", "PYTHONUNBUFFERED": "1"}
                words = [sys.executable, "-m", "pytest", "-v", "--durations=0", "--durations-min=1", *files]
                started.append(subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL))
            codes = [lane.wait() for lane in started]
            failed |= any(codes)
        for file in Path(folder).iterdir():
            figures.update(json.loads(file.read_text()))
    seconds = time.monotonic() - began
    print(f"\nchaos: {seconds:.0f} s (at most {MAX_SECONDS:.0f} on two quiet cores), seed {SEED}")
    for what, count in sorted(figures.items()):
        print(f"{count:8d}  {what}")
    if figures["kills"] < MIN_KILLS:
        print(f"missed: {figures['kills']} kills, at least {MIN_KILLS} are meant")
    return int(failed or figures["kills"] < MIN_KILLS)


if __name__ == "__main__":
    sys.exit(main())
