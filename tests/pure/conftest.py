"""A small model as a run makes it, for tests that read or spoil one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import load_config


@pytest.fixture(scope="session")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the quick start makes."""
    return prepare(load_config(["configs/quickstart.yaml"]), tmp_path_factory.mktemp("made")).model_folder


@pytest.fixture
def model(made_model: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(made_model, tmp_path / "model"))
