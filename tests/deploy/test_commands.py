"""The commands of the page about Kubernetes, in its order, against a stand-in that refuses what a cluster would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).with_name("stub_kubectl.py")
KUBECTL = shutil.which("kubectl")

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="kubectl, which builds the kustomizations, is not installed")


def page() -> list[str]:
    """The commands of the section, without those that only look."""
    section = re.split(r"^## ", (ROOT / "docs/operations.md").read_text(), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith("Kubernetes\n")]
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [line for line in lines if line.startswith("kubectl") and "--watch" not in line]


def run(commands: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The commands by a shell that finds the stand-in as `kubectl`, and what the page copies, in `folder`."""
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    (folder / "models/policy").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "data/train.parquet").touch()
    (folder / "bin").mkdir()
    (stub := folder / "bin/kubectl").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "REAL_KUBECTL": str(KUBECTL)}
    script = "set -e\n" + "\n".join(commands)
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_commands_work_in_the_order_of_the_page(tmp_path: Path) -> None:
    done = run(page(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "RayJob baton" in done.stdout and "deleted Pod baton-fill" in done.stdout


@pytest.mark.parametrize(
    ("left_out", "why"),
    [
        ("namespace.yaml", "namespace baton not found"),
        ("create secret", "pending: Secret baton-redis"),
        ("storage.yaml", "pods baton-fill not found"),
        ("kubectl cp models", "/runs/models/policy is not in the volume"),
        ("kubectl cp data", "/runs/data/train.parquet is not in the volume"),
    ],
)
def test_without_one_of_them_the_training_does_not_begin(left_out: str, why: str, tmp_path: Path) -> None:
    commands = [line for line in page() if left_out not in line]
    assert len(commands) == len(page()) - 1
    done = run(commands, tmp_path)
    assert done.returncode and why in done.stderr
