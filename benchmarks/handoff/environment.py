"""The benchmark's own virtual environment, in which the peers are installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks import own_environment

HERE = Path(__file__).parent
FOLDER = own_environment.ROOT / "build" / "bench-handoff"


def run_there(arguments: list[str]) -> int:
    """Run the benchmark in that environment; returns its exit code."""
    python = own_environment.own_python(FOLDER, HERE / "peers.txt", HERE / "requirements.txt")
    command = [str(python), "-m", "benchmarks.handoff", *arguments]
    return subprocess.run(command, cwd=own_environment.ROOT, check=False).returncode


def is_here() -> bool:
    """Whether this interpreter belongs to that environment."""
    return own_environment.is_here(FOLDER)
