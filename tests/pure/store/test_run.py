"""`baton run` with a store: what is refused before Ray starts, and what is in the store when the command ends."""

import json
import re
from pathlib import Path

import pytest

from actors.driver import run as running
from service.config import Config, load_config
from service.errors import RunFailed, UserError
from service.run.folder import FINAL, SUMMARY
from service.run.records.writer import RunWriter
from service.store import uploads as uploading
from tests.pure.store.memory import MemoryObjects

SUMMARY_OF_RUN = {"state": "finished", "steps": 3}


def trained(config: Config, folder: RunWriter, *others: object) -> int:
    """A run without Ray: it leaves the final weights and a summary."""
    (folder.path / FINAL).mkdir()
    (folder.path / FINAL / "model.safetensors").write_bytes(b"weights")
    folder.has_final = True
    folder.write_summary(SUMMARY_OF_RUN)
    return 0


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryObjects:
    store = MemoryObjects()
    monkeypatch.setattr(uploading, "Objects", lambda *how: store)
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    monkeypatch.setattr(running, "_run_on_ray", trained)
    return store


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = [f"run.dir={tmp_path}", "run.store=s3://bucket/run", "model.warm_start=null"]
    return load_config([Path("configs/quickstart.yaml")], settings)


def test_when_the_command_ends_the_store_has_how_the_run_ended(
    objects: MemoryObjects, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert running.run(config) == 0
    said = capsys.readouterr().out
    assert "NOTE" not in said and "s3://bucket/run has no checkpoint and the final weights" in said.splitlines()[-1]
    assert objects.held["final/model.safetensors"] == b"weights"
    assert json.loads(objects.held[SUMMARY]) == SUMMARY_OF_RUN
    with pytest.raises(UserError, match="holds other files"):
        running.run(config)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["quickstart"]


def test_a_store_that_cannot_be_listed_ends_the_command_with_a_line_before_ray_starts(
    objects: MemoryObjects, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_run_on_ray", None)
    objects.fails = lambda doing, name: True
    with pytest.raises(UserError, match=r"^run.store: memory://bucket/run: list"):
        running.run(config)
    assert not (tmp_path / "quickstart").exists()


def test_what_could_not_be_uploaded_is_said_and_the_run_is_as_it_ended(
    objects: MemoryObjects, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects.fails = lambda doing, name: name.startswith(FINAL)
    assert running.run(config) == RunFailed.exit_code
    assert json.loads((tmp_path / "quickstart" / SUMMARY).read_text()) == SUMMARY_OF_RUN
    said = capsys.readouterr().out
    assert re.search(r"lacks files that only \S+/quickstart has now: not uploaded: the final weights: .* failed", said)


def test_a_run_that_fails_uploads_its_checkpoints_and_then_says_why_it_failed(
    objects: MemoryObjects, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[bool]()
    monkeypatch.setattr(uploading.Uploads, "finish", lambda uploads: waited.append(True))

    def failing(*arguments: object) -> int:
        raise RunFailed("an actor failed")

    monkeypatch.setattr(running, "_run_on_ray", failing)
    with pytest.raises(RunFailed, match="an actor failed"):
        running.run(config)
    assert waited and SUMMARY not in objects.held
