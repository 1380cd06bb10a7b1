"""The current folder: modules of the user are found in it, and nothing in it takes another module's place."""

import subprocess
import sys
from pathlib import Path

import pytest

from service.config import Config
from service.config.paths import check_paths
from service.environment_variables import SAFE_PATH, USER_FOLDER
from service.errors import ConfigError, UserError
from service.rollout.environment import Task
from service.rollout.environments.registry import make_environment
from service.rollout.factory import IsolatedEnvironment, environment_processes
from service.user_code import registered
from tests import hostile_folder
from tests.waiting import ran

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
BATON = [sys.executable, "-P", "-c", "import sys; from service.cli import main; sys.exit(main())"]
"""As the installed command: the current folder is not on the import path by itself."""


def said(folder: Path, *words: str, command: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return ran(*(command or BATON), *words, folder=folder, PYTHONPATH=str(ROOT))


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hostile folder as the current one."""
    monkeypatch.chdir(hostile_folder.make(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(USER_FOLDER, str(tmp_path))
    return tmp_path


def test_no_file_of_the_current_folder_is_executed_that_no_setting_names(tmp_path: Path) -> None:
    folder = hostile_folder.make(tmp_path)
    listed = said(folder, "logs", "nobody")
    assert (listed.returncode, listed.stderr.count("\n")) == (2, 1) and "nobody: neither" in listed.stderr
    own = ["env.name=my_envs:Escape", "env.trusted_modules=[my_envs]", "data.make_rows=null", "data.train=rows.jsonl"]
    validate = ["config", "validate", "--config", QUICKSTART, "model.warm_start=null"]
    valid = said(folder, *validate, *own)
    assert (valid.returncode, valid.stderr) == (0, "")
    assert not (folder / "executed").exists()
    assert "did you mean my_envs:Escape?" in said(folder, *validate, *own[1:], "env.name=my_envs:Escpe").stderr
    (folder / "my_envs.py").write_text("class Escape:\n    oh no\n")
    assert "importing my_envs failed: SyntaxError" in said(folder, *validate, *own).stderr


def test_the_module_that_is_run_as_the_command_leaves_the_current_folder_out(tmp_path: Path) -> None:
    (tmp_path / "html.py").write_text("raise SystemExit('executed')")
    done = said(tmp_path, "logs", "nobody", command=[sys.executable, "-m", "service"])
    assert done.returncode == 2 and "nobody: neither" in done.stderr


def test_another_package_named_actors_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "actors.py").write_text("raise SystemExit('executed')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from service.cli import main; sys.exit(main())"
    done = said(tmp_path, "run", "--config", QUICKSTART, command=[sys.executable, "-P", "-c", code])
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"the package actors is {tmp_path / 'actors.py'}" in done.stderr


def test_a_function_without_the_decorator_is_refused_with_the_line_that_is_missing() -> None:
    with pytest.raises(
        ConfigError, match=r"^algorithm\.estimator: html:escape .* the decorator @estimator\(.escape.\)"
    ):
        registered("algorithm.estimator", "estimator", "html:escape", {})


def test_a_module_of_the_user_that_has_the_name_of_another_is_refused_by_both_files(hostile: Path) -> None:
    with pytest.raises(UserError, match=rf"{hostile}/html\.py has the name of another module, .*/html/__init__\.py"):
        make_environment("html:Escape", {}, ["html"])
    with pytest.raises(ConfigError, match=rf"algorithm\.loss: .*{hostile}/html\.py has the name of another module"):
        registered("algorithm.loss", "loss", "html:escape", {})
    config = Config.model_validate({"algorithm": {"loss": "html:escape"}})
    with pytest.raises(UserError, match="has the name of another module"):
        check_paths(config, here=False)


async def test_an_environment_in_a_process_of_its_own_loads_the_standard_library(
    hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADED", str(hostile / "loaded"))
    monkeypatch.setenv(SAFE_PATH, "1")  # as in a generator
    processes = environment_processes(max_observation_characters=1000)
    try:
        await IsolatedEnvironment(processes, "my_envs:Escape", {}, ["my_envs"]).reset(Task("0", (), {}), 0)
    finally:
        await processes.close()
    html, folder, child = (hostile / "loaded").read_text().split("\n")
    assert not Path(html).is_relative_to(hostile)
    assert (folder, child) == (str(hostile), "helped"), "a program of an environment lost the modules beside it"
    assert not (hostile / "executed").exists()
