"""The parts of `make gpu`: each runs in a separate process, with its own deadline.

A part is a module of this folder with a function `measure(device, give)`, which passes each line of figures to `give`
as soon as it has the line. Lines that a part has passed before it crashes, hangs or is ended are kept.

    learner     {"figure": "0.6B: utilisation", ...}  {"figure": "1.7B: utilisation", ...}  then the GPU is lost
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.figures import Figures

ROOT = Path(__file__).parents[2]

FOLDER = "BATON_GPU_FOLDER"
"""Environment variable: the folder for a part's files."""

Give = Callable[[Figures], None]

END_SECONDS = 10.0
"""Seconds after the deadline in which the processes of a part must end, before they are killed."""

REASON_CHARACTERS = 300


class Skipped(Exception):
    """This machine lacks what the part needs; the message says what."""


class Part(NamedTuple):
    """One part of the measurement."""

    name: str
    """The name of its module, of its log, and of its object in the JSON."""
    title: str
    seconds: float
    """Its deadline in seconds."""
    needs: tuple[str, ...]
    """Modules that must be installed for it to run."""

    @property
    def module(self) -> str:
        """The full name of its module."""
        return f"benchmarks.gpu.{self.name}"

    @property
    def longest(self) -> float:
        """Maximum seconds until its processes have ended."""
        return self.seconds + END_SECONDS


LEARNER = ("numpy", "pydantic", "transformers", "safetensors")
ENGINE = (*LEARNER, "ray", "vllm", "xxhash")
PARTS = (
    Part("machine", "What the GPU reaches", 30.0, ("numpy",)),
    Part("learner", "Training steps", 280.0, LEARNER),
    Part("sharded", "FSDP2 on a mesh of one", 200.0, LEARNER),
    Part("attention", "Attention", 150.0, LEARNER),
    Part("engine", "Engine and trainer", 230.0, ENGINE),
    Part("experts", "Layers with experts", 180.0, LEARNER),
    Part("head", "The output head", 70.0, LEARNER),
    Part("weights", "Weights between host and GPU", 70.0, LEARNER),
    Part("game", "A model learns a game", 200.0, ENGINE),
)
"""In the order in which they run: the most valuable first."""


def run_part(part: Part, device: str, folder: Path) -> dict[str, Any]:
    """Run a part and return its object of the JSON; what it prints goes to `<name>.log` in the folder."""
    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return outcome(part, "not run", f"not installed: {', '.join(missing)}")
    lines, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.one", part.module, device, str(lines)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}  # a rehearsal may run beside other load
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", FOLDER: str(folder), **threads},
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
    given = _given(lines) if lines.exists() else []
    skipped = [line["skipped"] for line in given if "skipped" in line]
    figures = [line for line in given if "skipped" not in line]
    reason = reason or ("" if given else "it gave no figure")
    state = "failed" if reason else "not run" if skipped else "measured"
    return outcome(part, state, reason or "; ".join(skipped), time.monotonic() - started, figures)


def outcome(
    part: Part, state: str, reason: str, seconds: float = 0.0, figures: Sequence[Figures] = ()
) -> dict[str, Any]:
    """The part's object of the JSON; `state`: measured, not run or failed."""
    return {
        "part": part.name,
        "title": part.title,
        "state": state,
        "reason": reason,
        "seconds": round(seconds, 1),
        "figures": list(figures),
    }


def _given(lines: Path) -> list[dict[str, Any]]:
    """What a part gave; a process that is killed may have written only a part of its last line."""
    texts = lines.read_text().splitlines(keepends=True)
    return [json.loads(text) for text in texts if text.endswith("\n")]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:REASON_CHARACTERS] if lines else "it printed nothing"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the part's process and the processes that it started: by SIGTERM, then by SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:  # also if a signal interrupts the wait
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
