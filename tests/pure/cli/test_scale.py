"""`baton scale`: what a user asks for, and what a run makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.cli.parser import main
from service.config import Config, load_config
from service.config.load import resolved_yaml
from service.files import LOCK
from service.run.folder import CONFIG, SCALE, lock_run
from service.run.scale_request import asked_for

RANGE = "generator.engines={min: 2, max: 5}"


def run_of(folder: Path, *settings: str) -> Config:
    config = load_config(["configs/quickstart.yaml"], list(settings))
    (folder / CONFIG).write_text(resolved_yaml(config))
    (folder / LOCK).touch()
    return config


def test_a_run_has_as_many_generators_as_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run_of(tmp_path, RANGE)
    assert asked_for(tmp_path, config.generator, 2) == 5
    with lock_run(tmp_path):
        assert main(["scale", str(tmp_path), "--engines", "3"]) == 0
    assert "asked for 3 generators" in capsys.readouterr().out and asked_for(tmp_path, config.generator, 2) == 3


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", "[" * 9999, '{"engines": null}', '{"engines": 1e400}', '{"engines": NaN}', "\udcff"]
)
def test_a_number_that_cannot_be_read_changes_nothing(tmp_path: Path, text: str) -> None:
    config = run_of(tmp_path, RANGE)
    (tmp_path / SCALE).write_bytes(text.encode(errors="surrogateescape"))
    assert asked_for(tmp_path, config.generator, 4) == 4


def test_a_number_that_the_disk_does_not_give_changes_nothing(tmp_path: Path) -> None:
    config = run_of(tmp_path, RANGE)
    (tmp_path / SCALE).mkdir()
    assert asked_for(tmp_path, config.generator, 4) == 4


@pytest.mark.parametrize(
    ("settings", "engines", "why"),
    [
        ([RANGE], "6", "--engines 6: generator.engines allows 2 to 5"),
        (["generator.engines=2"], "3", "this run has 2, always; give {min: 1, max: 3} to a new run"),
        ([RANGE], "3", "no run is going on in this folder"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], engines: str, why: str
) -> None:
    run_of(tmp_path, *settings)
    assert main(["scale", str(tmp_path), "--engines", engines]) == 2
    said = capsys.readouterr().err
    assert why in said and len(said.splitlines()) == 1 and not (tmp_path / SCALE).exists()


def test_a_number_below_one_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["scale", str(tmp_path), "--engines", "0"])
    assert "argument --engines: '0' is no number from 1 on" in capsys.readouterr().err
