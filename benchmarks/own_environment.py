"""An environment of a benchmark's own: peers want other packages than Baton, so they get a folder under `build`."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def own_python(folder: Path, peers: Path, requirements: Path | None) -> Path:
    """The interpreter of the environment in `folder`, which is made if it is not there.

    `peers` are installed without what they require themselves, which brings engines and CUDA libraries that no
    comparison touches. `requirements`: what is installed instead; None: the packages that Baton itself runs with are
    there.
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
    """Whether this interpreter is that environment's."""
    return Path(sys.prefix).resolve() == folder.resolve()
