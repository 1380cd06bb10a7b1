"""A misspelt field in any file of deploy/ is found: each file is spoilt in many places, and its check must notice.

The documents for Kubernetes are spoilt in `test_manifests.py`; here are all other files, and that there is no file
that nobody spoils.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from service.config import load_config
from service.errors import UserError
from tests.deploy.spoilt import mappings, misspelt
from tests.deploy.test_launch import check_cluster, check_task
from tests.deploy.test_manifests import MADE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MOST = 12
"""Places of a file that are spoilt, spread evenly."""
FREE = {"envs", "file_mounts", "labels", "annotations", "matchers", "exp_labels", "exp_annotations"}
"""Mappings whose keys are anybody's choice."""

Check = Callable[[Path, Any, Path], bool]
"""(file, what it holds, an empty folder) -> whether its check passes."""


def runs(*command: str | Path, cwd: Path | None = None) -> bool:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, capture_output=True, timeout=240, check=False).returncode == 0


def written(folder: Path, file: Path, document: Any) -> Path:
    """The folder of the file, copied, with this in place of the file."""
    shutil.copytree(file.parent, folder / file.parent.name)
    target = folder / file.parent.name / file.name
    target.write_text(yaml.safe_dump(document))
    return target


def accepted(check: Callable[[Any], None], document: Any) -> bool:
    try:
        check(document)
    except jsonschema.ValidationError:
        return False
    return True


def ray_up(file: Path, document: Any, folder: Path) -> bool:
    return accepted(check_cluster, document)


def skypilot(file: Path, document: Any, folder: Path) -> bool:
    return accepted(check_task, document)


def prometheus(file: Path, document: Any, folder: Path) -> bool:
    return runs("promtool", "check", "config", written(folder, file, document))


def rules(file: Path, document: Any, folder: Path) -> bool:
    return runs("promtool", "check", "rules", written(folder, file, document))


def rules_test(file: Path, document: Any, folder: Path) -> bool:
    return runs("promtool", "test", "rules", written(folder, file, document))


def alertmanager(file: Path, document: Any, folder: Path) -> bool:
    return runs("amtool", "check-config", written(folder, file, document))


def kustomization(file: Path, document: Any, folder: Path) -> bool:
    shutil.copytree(DEPLOY / "kuberay", folder / "kuberay")
    place = folder / file.parent.relative_to(DEPLOY)
    (place / file.name).write_text(yaml.safe_dump(document))
    return runs("kubectl", "kustomize", place)


def configuration(file: Path, document: Any, folder: Path) -> bool:
    target = folder / file.name
    target.write_text(yaml.safe_dump(document))
    try:
        load_config([target], [])
    except UserError:
        return False
    return True


CHECKS: dict[str, Check] = {
    "ray/*.yaml": ray_up,
    "skypilot/*.yaml": skypilot,
    "prometheus/prometheus.yaml": prometheus,
    "prometheus/rules.yaml": rules,
    "prometheus/rules_test.yaml": rules_test,
    "prometheus/alertmanager.yaml": alertmanager,
    "kuberay/**/kustomization.yaml": kustomization,
    "kuberay/job/run.yaml": configuration,
}
CASES = [(file, check) for pattern, check in CHECKS.items() for file in sorted(DEPLOY.glob(pattern))]


def name_of(file: Path) -> str:
    return str(file.relative_to(DEPLOY))


@pytest.mark.parametrize(("file", "check"), CASES, ids=[name_of(file) for file, _ in CASES])
def test_the_file_passes_and_a_misspelt_field_anywhere_in_it_does_not(file: Path, check: Check, tmp_path: Path) -> None:
    document = yaml.safe_load(file.read_text())
    (tmp_path / "right").mkdir()
    assert check(file, document, tmp_path / "right")
    paths = list(mappings(document, FREE))
    chosen = paths if len(paths) <= MOST else paths[:: -(-len(paths) // MOST)]
    passed = []
    for number, path in enumerate(chosen):
        (tmp_path / str(number)).mkdir()
        if check(file, misspelt(document, path), tmp_path / str(number)):
            passed.append(path)
    assert passed == []


def test_a_misspelt_instruction_of_the_dockerfile_is_found(tmp_path: Path) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    right = (DEPLOY / "container/Dockerfile").read_text()
    for word in ("FROM", "RUN", "COPY", "USER", "WORKDIR", "ENV", "ARG", "CMD"):
        (tmp_path / "Dockerfile").write_text(right.replace(f"\n{word} ", f"\n{word}X ", 1))
        assert not runs(hadolint, tmp_path / "Dockerfile"), word
    assert runs(hadolint, DEPLOY / "container/Dockerfile")


def test_no_file_of_deploy_goes_unchecked() -> None:
    elsewhere = [DEPLOY / "container/Dockerfile", DEPLOY / "slurm/train.sbatch"]  # test_launch
    elsewhere += [DEPLOY / "monitoring/compose.yaml", *DEPLOY.glob("grafana/**/*.*")]  # test_compose, test_dashboards
    others = {file for file in DEPLOY.rglob("*") if file.is_file()} - {file for file, _ in CASES} - {*elsewhere}
    spoilt = {(document["kind"], document["metadata"]["name"]) for document in MADE}
    for file in sorted(others):
        for document in yaml.safe_load_all(file.read_text()):
            assert (document["kind"], document["metadata"]["name"]) in spoilt, name_of(file)
