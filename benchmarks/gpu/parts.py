"""The parts of `make gpu`: each runs in a separate process, with its own deadline.

A part is a function `measure(device, give)`, which passes each line of figures to `give` as soon as it has the line.
Lines that a part has passed before it crashes, hangs or is ended are kept.

    learner     {"figure": "0.6B: utilisation", ...}  {"figure": "1.7B: utilisation", ...}  then the GPU is lost
    the JSON    {"part": "learner", "state": "failed", "reason": "...", "figures": [0.6B, 1.7B]}
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.figures import Figures, Give, not_run

ROOT = Path(__file__).parents[2]

FOLDER = "BATON_GPU_FOLDER"
"""Environment variable: the folder for a part's files."""

END_SECONDS = 10.0
"""Seconds after the deadline in which the processes of a part must end, before they are killed."""

REASON_CHARACTERS = 300
NO_TESTS = 5
"""Exit code of pytest if it ran no test, for instance because a file was skipped as a whole."""

MEASURE_HERE = "import sys; from benchmarks.gpu.parts import measure_here; measure_here(*sys.argv[1:])"
"""The program of a part's process; its arguments are those of `measure_here`."""


class Part(NamedTuple):
    """One part of the measurement."""

    name: str
    """The name of its log, and of its object in the JSON."""
    function: str
    """Its function `measure`, as `module:name`."""
    title: str
    seconds: float
    """Its deadline in seconds."""
    needs: tuple[str, ...] = ()
    """Modules that must be installed for it to run."""

    @property
    def longest(self) -> float:
        """Maximum seconds until its processes have ended."""
        return self.seconds + END_SECONDS


LEARNER = ("numpy", "pydantic", "transformers", "safetensors")
ENGINE = (*LEARNER, "ray", "vllm", "xxhash")
KERNELS, TRAINING, ENGINES = "benchmarks.gpu.kernels", "benchmarks.gpu.training", "benchmarks.gpu.engine"
PARTS = (
    Part("routing", f"{ENGINES}:routing", "Routed experts of an engine", 150.0, ENGINE),
    Part("pause", f"{ENGINES}:pause", "The pause for many small tensors", 120.0, ENGINE),
    Part("graphs", f"{TRAINING}:graphs", "Compiling without a cache", 160.0, LEARNER),
    Part("deaths", f"{ENGINES}:deaths", "A generator and a rank that are killed", 160.0, ENGINE),
    Part("ipc", f"{ENGINES}:ipc", "Weights by CUDA IPC", 160.0, ENGINE),
    Part("checkpoint", f"{TRAINING}:checkpoint", "Checkpoints", 100.0, LEARNER),
    Part("machine", f"{KERNELS}:machine", "What the GPU reaches", 30.0, LEARNER),
    Part("learner", f"{TRAINING}:learner", "Training steps", 160.0, LEARNER),
    Part("small", f"{TRAINING}:small", "Training steps of a small model", 120.0, LEARNER),
    Part("sharded", f"{TRAINING}:sharded", "FSDP2 on a mesh of one", 160.0, LEARNER),
    Part("attention", f"{KERNELS}:attention", "Attention", 150.0, LEARNER),
    Part("agreement", f"{ENGINES}:agreement", "Engine and trainer", 120.0, ENGINE),
    Part("experts", f"{TRAINING}:experts", "Layers with experts", 160.0, LEARNER),
    Part("head", f"{KERNELS}:head", "The output head", 70.0, LEARNER),
    Part("weights", "benchmarks.gpu.weights:measure", "Weights between host and GPU", 70.0, LEARNER),
)
"""In the order in which they run: the most valuable first."""


def run_part(part: Part, device: str, folder: Path) -> dict[str, Any]:
    """Run a part and return its object of the JSON; what it prints goes to `<name>.log` in the folder."""
    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return outcome(part, "not run", f"not installed: {', '.join(missing)}")
    lines, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
    lines.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}  # a rehearsal may run beside other load
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", MEASURE_HERE, part.function, device, str(lines)],
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
    # a process that is killed may have written only a part of its last line
    texts = lines.read_text().splitlines(keepends=True) if lines.exists() else []
    figures = [json.loads(text) for text in texts if text.endswith("\n")]
    reason = reason or ("" if figures else "it gave no figure")
    return outcome(part, "failed" if reason else "measured", reason, time.monotonic() - started, figures)


def measure_here(function: str, device: str, file: str) -> None:
    """Measure a part in this process and append its figures to a file. An error ends the process with a traceback,
    whose last line becomes the reason of the failure."""

    def give(figures: Figures) -> None:
        if device == "cpu" and "low" in figures:  # ranges are those of an H100
            figures = figures | {"verdict": "rehearsed"}
        print(
            *(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items())
        )
        with Path(file).open("a") as lines:
            lines.write(json.dumps(figures) + "\n")

    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(device, give)


def outcome(
    part: Part, state: str, reason: str, seconds: float = 0.0, figures: Sequence[Figures] = ()
) -> dict[str, Any]:
    """The part's object of the JSON; `state`: measured, not run or failed."""
    told = {"part": part.name, "title": part.title, "state": state, "reason": reason}
    return told | {"seconds": round(seconds, 1), "figures": list(figures)}


def run_tests(give: Give, *words: str) -> None:
    """Run tests without this project's pytest settings, because a machine may lack their plugins, and report their
    outcome as one line."""
    name = " ".join(words)
    if importlib.util.find_spec("pytest") is None:
        return give(not_run(name, "pytest is not installed"))
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-q"]
    command += ["--confcutdir=tests/gpu", "--tb=short", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    ended_well = done.returncode in (0, NO_TESTS)
    verdict = (
        "inside" if ended_well and "passed" in last else "not run" if ended_well and "skipped" in last else "failed"
    )
    return give({"figure": name, "verdict": verdict, "note": last})


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
