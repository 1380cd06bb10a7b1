"""Every file of deploy/ passes the strict check of the program that reads it, or of its published schema.

The documents for Kubernetes are checked in `test_manifests.py`, those of Grafana and of the containers in
`test_dashboards.py` and `test_compose.py`.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config import load_config
from tests.deploy.test_launch import check_cluster, check_task
from tests.deploy.test_manifests import MADE

DEPLOY = Path(__file__).parents[2] / "deploy"


def accepted(*command: str | Path) -> None:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


CHECKS: dict[str, Callable[[Path], Any]] = {
    "ray/*.yaml": lambda file: check_cluster(yaml.safe_load(file.read_text())),
    "skypilot/*.yaml": lambda file: check_task(yaml.safe_load(file.read_text())),
    "prometheus/prometheus.yaml": lambda file: accepted("promtool", "check", "config", file),
    "prometheus/rules.yaml": lambda file: accepted("promtool", "check", "rules", file),
    "prometheus/rules_test.yaml": lambda file: accepted("promtool", "test", "rules", file),
    "prometheus/alertmanager.yaml": lambda file: accepted("amtool", "check-config", file),
    "kuberay/**/kustomization.yaml": lambda file: accepted("kubectl", "kustomize", file.parent),
    "kuberay/job/run.yaml": lambda file: load_config([file], []),
    "container/Dockerfile": lambda file: accepted(Path(sys.executable).parent / "hadolint", file),
}
CASES = [(file, check) for pattern, check in CHECKS.items() for file in sorted(DEPLOY.glob(pattern))]


@pytest.mark.parametrize(("file", "check"), CASES, ids=[str(file.relative_to(DEPLOY)) for file, _ in CASES])
def test_the_file_is_accepted(file: Path, check: Callable[[Path], Any]) -> None:
    check(file)


def test_no_file_of_deploy_goes_unchecked() -> None:
    elsewhere = {DEPLOY / "slurm/train.sbatch", DEPLOY / "monitoring/compose.yaml", *DEPLOY.glob("grafana/**/*.*")}
    made = {(document["kind"], document["metadata"]["name"]) for document in MADE}
    for file in {file for file in DEPLOY.rglob("*") if file.is_file()} - {file for file, _ in CASES} - elsewhere:
        for document in yaml.safe_load_all(file.read_text()):
            assert (document["kind"], document["metadata"]["name"]) in made, file
