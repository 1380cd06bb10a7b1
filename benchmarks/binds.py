"""The speed-up that `binds` predicts for more of a part, against the measured one: runs A, B, A of the quick start.

    python -m benchmarks.binds                          # all settings; about 3 minutes each on two quiet cores
    python -m benchmarks.binds --settings lookahead-0

A is the quick start, B has one more engine, rank or mini-batch of lookahead. A speed-up that A's status predicts must
be within `WITHIN` of the measured one. If the status predicts none, only the measured one is printed.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.in_process import warm_started
from benchmarks.own_environment import ROOT
from service.cli.status import fetch_status
from service.config import load
from service.errors import UserError
from service.run.folder import METRICS, read_address, read_lines

RECIPE = ROOT / "configs" / "quickstart.yaml"
SLOW = ("env.name=benchmarks.peer.slow_lookup:SlowLookup", "env.trusted_modules=[benchmarks.peer.slow_lookup]")
WITHIN = 0.15
FIRST = 8
"""The number of first steps, which do not count."""
LOOK_SECONDS = 2.0


class Setting(NamedTuple):
    """The settings of all runs, and those in which A and B differ."""

    more: str
    """What B has more of, in the words of the status."""
    both: Sequence[str]
    a: str
    b: str


LOOKAHEAD = "a buffer.lookahead of one more"
SETTINGS = {
    "lookahead-0": Setting(LOOKAHEAD, SLOW, "buffer.lookahead=0", "buffer.lookahead=1"),
    "lookahead-1": Setting(LOOKAHEAD, SLOW, "buffer.lookahead=1", "buffer.lookahead=2"),
    "engines": Setting("one more engine", (), "generator.engines=1", "generator.engines=2"),
    "ranks": Setting("one more rank", (), "trainer.ranks=1", "trainer.ranks=2"),
}


class Came(NamedTuple):
    """The result of a run."""

    seconds: float
    """Mean seconds of a step."""
    sentence: str
    """The last sentence of the status about what binds; empty if there was none."""


def came(settings: Sequence[str], folder: Path, steps: int) -> Came:
    """Run the quick start with these settings; returns its last status, and the mean seconds of the counted steps."""
    words = ["--config", str(RECIPE), *settings, f"run.dir={folder}", "run.name=run", f"run.max_steps={steps}"]
    process = subprocess.Popen([sys.executable, "-m", "service", "run", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    sentence = ""
    while process.poll() is None:
        time.sleep(LOOK_SECONDS)
        try:
            found = fetch_status(read_address(folder / "run")).get("binding")
        except (UserError, OSError, ValueError):
            continue  # before the first status, and after the last
        if isinstance(found, dict):
            sentence = str(found["sentence"])
    if process.returncode:
        raise SystemExit(f"baton run ended with exit code {process.returncode}")
    lines = read_lines(folder / "run" / METRICS)
    return Came(statistics.fmean(line["timing/step"] for line in list(lines)[FIRST:]), sentence)


def compare(setting: Setting, model: Sequence[str], steps: int) -> dict[str, object]:
    """Run A, B and A again; returns B's speed over the mean of the two A's, and what the status of A predicted."""
    found = []
    for more in (setting.a, setting.b, setting.a):
        with tempfile.TemporaryDirectory(prefix="bench-binds-") as name:
            found.append(came([*model, *setting.both, more], Path(name), steps))
    first, with_more, again = found
    gain = (first.seconds + again.seconds) / 2 / with_more.seconds
    pattern = re.compile(re.escape(setting.more) + r" would give ([\d.]+)x")
    given = [float(match[1]) for run in (first, again) for match in pattern.finditer(run.sentence)]
    return {
        "seconds": [run.seconds for run in found],
        "came": gain,
        "given": given,
        "holds": all(abs(each / gain - 1) <= WITHIN for each in given),
        "sentences": [run.sentence for run in found],
    }


def main() -> int:
    """Print a line of JSON for each setting; the exit code is 0 if every predicted speed-up holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.binds", description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each run")
    arguments = parser.parse_args()
    holds = True
    with tempfile.TemporaryDirectory(prefix="bench-binds-") as name:
        _, model = warm_started(load([RECIPE], []).config, Path(name))
        words = ["model.make=null", "model.warm_start=null", f"model.path={model}"]
        for setting in arguments.settings:
            found = compare(SETTINGS[setting], words, arguments.steps)
            holds &= bool(found["holds"])
            print(json.dumps({"setting": setting, **found}), flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
