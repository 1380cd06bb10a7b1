"""The secret of a run, from its folder to its generators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actors.driver.run as running
from service.config import Config
from service.rollout.run_secret import SECRET_FILE, RunSecret
from service.run.records.writer import RunWriter


def test_the_secret_reaches_the_generators_and_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "prepare", lambda config, folder: SimpleNamespace(model_folder=folder))
    told: list[Any] = []
    monkeypatch.setattr(running, "_run_on_ray", lambda *words: told.append(words) or 0)
    (tmp_path / "run").mkdir()
    folder = RunWriter(tmp_path / "run", has_begun=True)
    config = Config.model_validate({"env": {"name": "agent", "command": ["true"]}})
    assert running._run(config, folder, None) == 0
    (secret,) = [word for word in told[0] if isinstance(word, RunSecret)]
    assert secret.value.hex() == (folder.path / SECRET_FILE).read_text()
    for file in folder.path.rglob("*"):
        assert not file.is_file() or file.name == SECRET_FILE or secret.value.hex() not in file.read_text()
