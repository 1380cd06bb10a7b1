"""A small model as a run makes it, for tests that read or spoil one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slowest import COMMITTED, SLOW_SECONDS, read_seconds

ROOT = Path(__file__).parents[2]
Refused = Callable[..., str]
"""The fixture `refused`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow files: they start processes or train a model."""
    slow = {ROOT / name for name, seconds in read_seconds(COMMITTED).items() if seconds >= SLOW_SECONDS}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the quick start makes."""
    from actors.driver.prepare import prepare  # here, because the process that only hands out tests needs no torch
    from service.config import load_config

    return prepare(load_config(["configs/quickstart.yaml"]), tmp_path_factory.mktemp("made")).model_folder


@pytest.fixture
def model(made_model: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(made_model, tmp_path / "model"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Gives the one line with which a command line is refused."""
    from service.cli.parser import main

    def line_of(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("baton") and said.count("\n") == 1
        return said

    return line_of
