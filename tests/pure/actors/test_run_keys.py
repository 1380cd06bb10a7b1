"""The keys of a run's agents, from the environment of its driver to its generators."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actors.driver.run as running
from service.agents.session_keys import SECRET_FILE, WORKER_KEY, Keys
from service.cli.parser import main
from service.config import Config
from service.errors import UserError
from service.run.writer import RunWriter

OUTSIDE = Config.model_validate({"env": {"name": "agent", "workers": "outside"}, "agents": {"port": 8400}})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunWriter:
    """The folder of a run whose data and model are prepared."""
    monkeypatch.setattr(running, "prepare", lambda config, folder: SimpleNamespace(model_folder=folder))
    (tmp_path / "run").mkdir()
    return RunWriter(tmp_path / "run", has_begun=True)


def test_the_worker_key_reaches_the_generators_and_no_process_that_starts_later(
    folder: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(running, "_run_on_ray", lambda *words: told.append(words) or 0)
    monkeypatch.setenv(WORKER_KEY, "key-of-all-workers")
    assert running._run(OUTSIDE, folder, None) == 0
    (keys,) = [word for word in told[0] if isinstance(word, Keys)]
    assert keys.is_worker("key-of-all-workers") and WORKER_KEY not in os.environ
    secret = (folder.path / SECRET_FILE).read_text()
    assert keys.of("0-0-0") == Keys(bytes.fromhex(secret)).of("0-0-0")
    for file in folder.path.rglob("*"):
        if file.is_file() and file.name != SECRET_FILE:
            assert "key-of-all-workers" not in file.read_text() and secret not in file.read_text()


def test_a_run_whose_workers_would_have_no_key_is_refused_and_leaves_no_folder(
    folder: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    with pytest.raises(UserError, match=r"env.workers: outside needs a worker key"):
        running._run(OUTSIDE, folder, None)
    assert not folder.path.exists()


def test_a_missing_worker_key_is_refused_before_anything_large_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(WORKER_KEY, raising=False)
    outside = {"name": "agent", "command": ["run"], "workers": "outside"}
    config = {"model": {"path": "model"}, "data": {"train": "train.jsonl"}, "env": outside, "agents": {"port": 8400}}
    file = tmp_path / "outside.yaml"
    file.write_text(json.dumps(config))
    assert main(["run", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "env.workers: outside needs a worker key" in said
