"""Programs with packages of their own run in an environment of their own, made from PyPI once and kept in build."""

from __future__ import annotations

import asyncio
import fcntl
import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest

INSTALLED = Path(__file__).parents[3] / "build" / "agents"
INSTALL_SECONDS, RUN_SECONDS = 900, 300
IN_TIME = pytest.mark.timeout(INSTALL_SECONDS + RUN_SECONDS)
"""For tests that may install packages first."""


def python_with(*requirements: str) -> Path:
    """The interpreter of an environment with these packages; the test is skipped where they cannot be had."""
    folder = INSTALLED / "-".join(one.partition("==")[0] for one in requirements)
    python, done = folder / "bin" / "python", folder / "installed.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several of pytest's workers may need the environment at the same time
        if not done.exists() or json.loads(done.read_text()) != [*requirements]:
            venv.create(folder, with_pip=True, clear=True)
            command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
            if subprocess.run(command, timeout=INSTALL_SECONDS).returncode:
                pytest.skip(f"{' '.join(requirements)} cannot be installed")
            done.write_text(json.dumps(requirements))
    return python


async def printed_by(python: Path, program: str, *arguments: str) -> Any:
    """The JSON that a program beside this file prints; it imports nothing of this project."""
    command = [str(python), str(Path(__file__).with_name(program)), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(RUN_SECONDS):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, out.decode()
    return json.loads(out.splitlines()[-1])
