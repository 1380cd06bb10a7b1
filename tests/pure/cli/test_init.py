"""`baton init`: what it writes is right as it is, and what it refuses it leaves alone."""

import sys
from pathlib import Path

import pytest

from service.cli.init import PLACEHOLDER, write_task
from service.cli.parser import main
from service.cli.recipes import config_file, recipes
from service.config import RunConfig, load_config
from service.errors import UserError
from service.rollout.environments.registry import synthetic_data
from tests.pure.conftest import Refused
from tests.waiting import ran

ROOT = Path(__file__).parents[3]
FILES = [".gitignore", "README.md", "config.yaml", "environment.py", "pytest.ini", "test_environment.py", "train.jsonl"]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new task, in its folder."""
    write_task(tmp_path / "my-task")
    monkeypatch.chdir(tmp_path / "my-task")
    monkeypatch.syspath_prepend(str(tmp_path / "my-task"))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    return tmp_path / "my-task"


def test_a_new_task_is_written_and_what_comes_next_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "work/my-task"]) == 0
    folder = Path("work/my-task")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert all(PLACEHOLDER not in path.read_text() for path in folder.iterdir())
    assert (folder / ".gitignore").read_text().split() == ["runs/", "models/"], "Ray uploads the rest with a job"
    said, readme = capsys.readouterr().out, (folder / "README.md").read_text()
    assert "cd work/my-task" in said and "baton run --config config.yaml" in said
    assert readme.startswith("# my-task\n") and [name for name in FILES[2:] if f"`{name}`" not in readme] == []
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    assert load_config([Path("config.yaml")]).run.name == "my-task"
    assert main(["config", "validate", "--config", "config.yaml"]) == 0
    assert capsys.readouterr().out == "config.yaml: fine\n"


def test_the_folder_of_a_task_is_no_run(task: Path, refused: Refused) -> None:
    for command in ("status", "logs"):
        assert "no run was started in this folder\n" in refused(command, ".")
    (task / "runs" / "my-task").mkdir(parents=True)
    (task / "runs" / "my-task" / "config.yaml").touch()
    assert refused("status", ".").endswith("in this folder; a run of it is runs/my-task\n")


def test_the_test_of_a_new_tasks_environment_passes_in_a_project_with_settings_of_its_own(task: Path) -> None:
    settings = 'asyncio_default_fixture_loop_scope = "session"\nfilterwarnings = ["error"]\n'
    (task.parent / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\n{settings}")
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = ran(*pytest_here, folder=task, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


def test_a_module_of_ones_own_lacks_what_the_configuration_asks_for(task: Path, refused: Refused) -> None:
    """The new task's environment makes words and demonstrations; it makes no rows."""
    assert synthetic_data("environment:GuessNumber", ["environment"], "vocabulary")()
    said = refused("config", "validate", "--config", "config.yaml", "data.eval_make_rows=3")
    assert "'environment:GuessNumber' makes no rows" in said
    with pytest.raises(UserError, match=r"env\.trusted_modules"):
        synthetic_data("environment:GuessNumber", [], "vocabulary")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("my task!", "my-task"), (".hidden", "hidden"), ("-", "my-task"), ("größe", "gr-e"), ("a/b c", "a/b-c")],
)
def test_a_name_that_no_run_can_have_is_refused_with_one_that_is_near(
    name: str, nearest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        write_task(Path(name))
    assert str(refused.value).endswith(f"for example {nearest}")
    assert list(tmp_path.iterdir()) == []
    write_task(Path(nearest))
    RunConfig(name=Path(nearest).name)


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path: Path) -> None:
    taken, file, empty = tmp_path / "taken", tmp_path / "file", tmp_path / "empty"
    taken.mkdir()
    empty.mkdir()
    (taken / "mine.txt").write_text("mine")
    (tmp_path / "taken-2").mkdir()
    file.write_text("a file")
    with pytest.raises(UserError, match=r"taken is not empty.*taken-3"):
        write_task(taken)
    with pytest.raises(UserError, match="is a file"):
        write_task(file)
    assert [path.name for path in taken.iterdir()] == ["mine.txt"] and file.read_text() == "a file"
    assert write_task(empty) == FILES


def test_a_recipe_is_found_wherever_the_command_is_typed_and_a_file_goes_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file("configs/quickstart.yaml") == recipes() / "quickstart.yaml"
    assert config_file("configs/none.yaml") == Path("configs/none.yaml")
    assert config_file("quickstart.yaml") == Path("quickstart.yaml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("")
    assert config_file("configs/quickstart.yaml") == Path("configs/quickstart.yaml")
