"""The benchmark's own environment: the peers want other versions than Baton, so they get a folder of their own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "bench-handoff"


def python_with_peers() -> Path:
    """The interpreter of the environment, which is made if it is not there."""
    python, made = FOLDER / "bin" / "python", FOLDER / "made"
    if not made.exists():
        print(f"making the environment {FOLDER} ...", flush=True)
        venv.create(FOLDER, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--requirement", str(HERE / "requirements.txt")], check=True)
        subprocess.run([*pip, "--no-deps", "--requirement", str(HERE / "peers.txt")], check=True)
        made.touch()
    return python


def run_there(arguments: list[str]) -> int:
    """Run the benchmark in that environment; its exit code."""
    command = [str(python_with_peers()), "-m", "benchmarks.handoff", *arguments]
    return subprocess.run(command, cwd=HERE.parents[1], check=False).returncode


def is_here() -> bool:
    """Whether this interpreter is that environment's."""
    return Path(sys.prefix).resolve() == FOLDER.resolve()
