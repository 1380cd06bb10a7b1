"""The parts of `make gpu`: each runs in a process of its own, with a deadline of its own.

A part is a module of this folder with a function `measure(device, give)`, which hands over a line of figures as soon as
it has one. What a part has given before it crashes, hangs or is ended stays.

    learner     {"shape": "0.6B", "layout": "packed", ...}  {"shape": "1.7B", ...}  then the GPU is lost
    the JSON    {"part": "learner", "state": "failed", "reason": "...", "figures": [0.6B, 1.7B]}
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

Figures = dict[str, str | float]
"""One line of a part's table."""

Give = Callable[[Figures], None]

END_SECONDS = 10.0
"""Seconds that the processes of a part have to end after the deadline, before they are killed."""

REASON_CHARACTERS = 300


class Skipped(Exception):
    """This machine lacks what the part needs; the message says what."""


class Part(NamedTuple):
    """One part."""

    name: str
    """Of its module, log and object in the JSON."""
    title: str
    seconds: float
    """Its deadline."""
    needs: tuple[str, ...]
    """Modules without which it is skipped."""

    @property
    def module(self) -> str:
        """The module that measures."""
        return f"benchmarks.gpu.{self.name}"


LEARNER = ("numpy", "pydantic", "transformers", "safetensors")
PARTS = (
    Part("learner", "Training steps", 360.0, LEARNER),
    Part("advantage", "Advantages to tokens, against a copy", 40.0, ("numpy",)),
    Part("suite", "tests/gpu", 400.0, (*LEARNER, "pytest")),
    Part("transports", "Weights into an engine", 240.0, (*LEARNER, "vllm", "xxhash")),
    Part("agreement", "Log-probabilities of engine and trainer", 160.0, (*LEARNER, "vllm", "xxhash")),
    Part("quickstart", "The quick start", 220.0, (*LEARNER, "ray", "vllm")),
)


def run_part(part: Part, device: str, folder: Path) -> dict[str, Any]:
    """Run a part and return its object of the JSON; what it prints goes to `<name>.log` in the folder."""
    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return _outcome(part, "skipped", f"not installed: {', '.join(missing)}", 0.0, [])
    lines, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.one", part.module, device, str(lines)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}  # a rehearsal may run beside much else
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **threads},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            reason = f"ended with exit code {code}: {_last_line(log)}" if (code := process.wait(part.seconds)) else ""
        except subprocess.TimeoutExpired:
            reason = f"not done after {part.seconds:g} s; the last line of {log.name}: {_last_line(log)}"
        finally:
            _end_session(process)
    given = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    skipped = [line["skipped"] for line in given if "skipped" in line]
    figures = [line for line in given if "skipped" not in line]
    state = "failed" if reason else "skipped" if skipped else "measured"
    return _outcome(part, state, reason or "; ".join(skipped), time.monotonic() - started, figures)


def _outcome(part: Part, state: str, reason: str, seconds: float, figures: list[Figures]) -> dict[str, Any]:
    return {
        "part": part.name,
        "title": part.title,
        "state": state,
        "reason": reason,
        "seconds": round(seconds, 1),
        "figures": figures,
    }


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:REASON_CHARACTERS] if lines else "it printed nothing"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the part's process and those that it started: first asked, then killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
