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
from benchmarks.peer.progress import report
from service.run.folder import METRICS, read_lines

LOOK_SECONDS = 0.2
PARTS = {
    "VLLM::": "engine core",
    "ray::Generator": "generator",
    "ray::TrainerRank": "ranks",
    "ray::BufferActor": "buffer",
}
"""The part of the run to which a process belongs, by the beginning of its title."""


class Look(NamedTuple):
    """The state of the run at one time."""

    step: int
    """Optimizer steps so far."""
    wall: float
    cpu: dict[str, float]
    """CPU seconds of each part of the run so far."""


def trained(words: Sequence[str], folder: Path) -> tuple[list[Look], list[dict[str, Any]]]:
    """Run with these settings; returns what was measured while it ran, and the metrics of each step."""
    command = [sys.executable, "-m", "service", "run", *words, f"run.dir={folder}", "run.name=run"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    metrics, found, spent = folder / "run" / METRICS, list[Look](), dict[psutil.Process, tuple[str, float]]()
    rewards: list[float] = []
    while process.poll() is None:
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        _look(psutil.Process(process.pid), spent)
        cpu = {part: sum(s for p, s in spent.values() if p == part) for part in {p for p, _ in spent.values()}}
        found.append(Look(step, time.monotonic(), cpu))
        if step > len(rewards):
            before, rewards = len(rewards), _rewards(metrics)
            for at, reward in enumerate(rewards[before:], before + 1):
                report("baton", at, sum(cpu.values()), reward)
        time.sleep(LOOK_SECONDS)
    if process.returncode:
        raise SystemExit(f"baton run ended with exit code {process.returncode}")
    return found, list(read_lines(metrics))


def _rewards(metrics: Path) -> list[float]:
    """The mean reward of each step so far."""
    return [line["reward/avg_raw_reward"] for line in read_lines(metrics)]


def _look(driver: psutil.Process, spent: dict[psutil.Process, tuple[str, float]]) -> None:
    """Record the part and the CPU seconds of each process of the run; processes that ended keep their last values."""
    try:
        for process in (driver, *driver.children(recursive=True)):
            part, _ = spent.get(process, ("the rest", 0.0))
            if process == driver:
                part = "driver"
            elif part == "the rest":
                title = process.cmdline()[0]
                part = next((part for begin, part in PARTS.items() if title.startswith(begin)), part)
            times = process.cpu_times()
            spent[process] = part, times.user + times.system
    except (psutil.Error, IndexError):
        return  # a process has just ended; the next look finds the others
