"""A separate virtual environment under `build` for a benchmark, because peers need other packages than Baton."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def own_python(folder: Path, peers: Path, requirements: Path | None) -> Path:
    """The interpreter of the environment in `folder`, which is created if it does not exist.

    `peers` are installed without their dependencies, which include engines and CUDA libraries that no comparison uses.
    `requirements` are installed instead; None: the environment uses the packages of Baton's own environment.
    """
    python, made = folder / "bin" / "python", folder / "made"
    if not made.exists():
        print(f"making the environment {folder} ...", flush=True)
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        if requirements is None:
            (own,) = folder.glob("lib/python*/site-packages")
            (own / "baton.pth").write_text(sysconfig.get_path("purelib"))
        else:
            subprocess.run([*pip, "--requirement", str(requirements)], check=True)
        subprocess.run([*pip, "--no-deps", "--requirement", str(peers)], check=True)
        made.touch()
    return python


def is_here(folder: Path) -> bool:
    """Whether this interpreter belongs to that environment."""
    return Path(sys.prefix).resolve() == folder.resolve()
