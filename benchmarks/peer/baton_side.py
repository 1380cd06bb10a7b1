"""Baton's side: `baton run`, measured from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.own_environment import ROOT
from service.run.folder import METRICS, read_lines

LOOK_SECONDS = 0.2


class Look(NamedTuple):
    """The state of the run at one time."""

    step: int
    """Optimizer steps so far."""
    wall: float
    cpu: float
    """CPU seconds of all processes of the run so far."""


def trained(words: Sequence[str], folder: Path) -> tuple[list[Look], list[dict[str, Any]]]:
    """Run with these settings; returns what was measured while it ran, and the metrics of each step."""
    command = [sys.executable, "-m", "service", "run", *words, f"run.dir={folder}", "run.name=run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics, found, spent = folder / "run" / METRICS, list[Look](), dict[psutil.Process, float]()
    while process.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        _look(psutil.Process(process.pid), spent)
        found.append(Look(step, time.monotonic(), sum(spent.values())))
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise SystemExit(f"baton run ended with exit code {process.returncode}")
    return found, list(read_lines(metrics))


def _look(driver: psutil.Process, spent: dict[psutil.Process, float]) -> None:
    """Record the CPU seconds of each process of the run; processes that ended keep their last values."""
    try:
        for process in (driver, *driver.children(recursive=True)):
            times = process.cpu_times()
            spent[process] = times.user + times.system
    except psutil.Error:
        return  # a process has just ended; the next look finds the others
