"""The package as a user has it: a wheel in an environment of its own, a task from `baton init`, a run to its end."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1000)]

FEW_STEPS = ["run.max_steps=3", "model.warm_start.steps=30", "metrics.port=0"]


def said_by(*command: str | Path, folder: Path) -> str:
    """What a command printed; it has to end well. Nothing of this checkout is on its path."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel."""
    folder = tmp_path_factory.mktemp("dist")
    said_by(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh environment that holds the wheel, beside the other packages of the one that tests run in."""
    venv = tmp_path_factory.mktemp("package") / "venv"
    said_by(sys.executable, "-m", "venv", "--without-pip", venv, folder=ROOT)
    python = venv / "bin" / "python"
    said_by(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, folder=venv)
    paths = {name: sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (own,) = venv.glob("lib/python*/site-packages")
    # Lines of a .pth file add folders only: the .pth of an editable installation that lies in them is not read.
    (own / "others.pth").write_text("".join(f"{path}\n" for path in sorted(set(paths.values()))))
    return venv / "bin"


def test_the_wheel_holds_code_recipes_and_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"service/recipes/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    task = Path("baton/examples/new_task")
    data = {str(task / path.name) for path in (ROOT / task).iterdir() if path.is_file()}
    assert recipes | data | {"service/observe/status_page.html", "baton/examples/data/corpus.jsonl"} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"service", "actors", "baton"}


def test_the_quick_start_trains_in_an_empty_folder(programs: Path, tmp_path: Path) -> None:
    recipe = ["config", "validate", "--config", "configs/quickstart.yaml"]
    assert ": fine" in said_by(programs / "baton", *recipe, folder=tmp_path)
    assert "finished after 3 optimizer steps" in said_by(programs / "baton", "quickstart", *FEW_STEPS, folder=tmp_path)
    assert (tmp_path / "runs" / "quickstart" / "final" / "model.safetensors").is_file()


def test_a_task_of_ones_own_trains_where_only_the_wheel_is_installed(programs: Path, tmp_path: Path) -> None:
    found = said_by(programs / "python", "-c", "import service; print(service.__file__)", folder=tmp_path)
    assert Path(found.strip()).is_relative_to(programs.parent)

    said_by(programs / "baton", "init", "my-task", folder=tmp_path)
    task = tmp_path / "my-task"
    assert "passed" in said_by(programs / "python", "-m", "pytest", "-q", folder=task)
    own = ["--config", "config.yaml"]
    assert "config.yaml: fine" in said_by(programs / "baton", "config", "validate", *own, folder=task)
    said = said_by(programs / "baton", "run", *own, *FEW_STEPS, folder=task)
    assert "finished after 3 optimizer steps" in said
    summary = json.loads((task / "runs" / "my-task" / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["tokens"]["trained"] > 0
    assert (task / "runs" / "my-task" / "final" / "model.safetensors").is_file()
    assert "my-task" in said_by(programs / "baton", "status", "runs/my-task", folder=task)
