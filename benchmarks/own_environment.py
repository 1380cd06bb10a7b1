"""What a benchmark has for itself: a virtual environment, because peers need other packages, and a Ray."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def own_ray(folder: str, num_cpus: int = 4, **environment: str) -> Iterator[None]:
    """Within the block Ray runs, with its files in `folder`; its processes can import code of the current folder."""
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd(), **environment}},
        _temp_dir=folder,
    )
    try:
        yield
    finally:
        ray.shutdown()
