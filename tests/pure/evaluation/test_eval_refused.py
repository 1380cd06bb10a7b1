"""What `baton eval` refuses: in one line, with code 2, before anything is started."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from actors.driver.evaluate_model import beside_a_run
from actors.driver.prepare import prepare
from service.cli.parser import main
from service.config import load_config, resolved_yaml
from service.run.checkpoints import MANIFEST, TRAINER, Checkpoints
from service.run.records.writer import RunWriter
from tests.pure.cli.test_resume_refused import write_checkpoint
from tests.pure.conftest import Refused

QUICKSTART = "configs/quickstart.yaml"
PART = f"{TRAINER}/rank_0_of_1.safetensors"

Said = Callable[..., str]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 20 and 40 and no final weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = load_config([QUICKSTART], ["data.eval_make_rows=4"])
    RunWriter(folder).begin(resolved_yaml(config))
    model, checkpoints = prepare(config, folder).model_folder, Checkpoints(folder / "checkpoints", keep=2)
    for step in (20, 40):
        write_checkpoint(checkpoints, step, model, config)
    return folder


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


class Started(Exception):
    """Ray would have been started."""


@pytest.fixture
def said(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> Said:
    """What an evaluation is refused with."""

    def start(*arguments: object) -> None:
        raise Started

    monkeypatch.setattr("actors.driver.evaluate_model.ray_session", start)
    return partial(refused, "eval")


def test_a_whole_run_and_its_checkpoints_and_model_are_evaluated(run: Path, said: Said) -> None:
    config = ["--config", str(run / "config.yaml")]
    for words in ([run], [run / "checkpoints/step_20"], [run / "model", *config]):
        with pytest.raises(Started):
            said(*words)


def test_paths_that_are_nothing_are_named_with_what_is_near(
    run: Path, said: Said, tmp_path: Path, refused: Refused
) -> None:
    assert "there is no such folder" in said(tmp_path / "runn")
    assert "there is no checkpoint of step 30; nearest: step_20, step_40" in said(run / "checkpoints/step_30")
    assert "there is no checkpoint of step 50; nearest: step_40" in said(run / "checkpoints/step_50")
    assert "one of its checkpoints: step_20, step_40" in said(run / "checkpoints")
    assert "no model (config.json), no run folder" in said(run / "logs")
    assert "no model (config.json), no run folder" in said(run / "config.yaml")
    assert "the folder has several sets" in said(run, f"data.eval.held_out={tmp_path}")
    away = Path(shutil.copytree(run / "checkpoints/step_20", tmp_path / "step_20"))
    assert "lies in no run folder" in said(away)
    assert "give a configuration" in said(Path(shutil.copytree(run / "model", tmp_path / "model")))
    refusal = refused("export", run, tmp_path / "adapter", "--adapter")
    assert "there is no adapter to export; leave out --adapter" in refusal
    shutil.rmtree(run / "checkpoints")
    assert "neither final weights nor a checkpoint" in said(run)


def test_a_checkpoint_is_found_from_within_its_folder(run: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "checkpoints/step_20")
    (run / "checkpoints/step_20" / PART).unlink()
    assert f"{PART} is missing" in said(Path())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "file", "told"),
    [
        (Path.unlink, PART, f"{PART} is missing"),
        (flip, PART, f"{PART} has other bytes than were written"),
        (Path.unlink, MANIFEST, f"no {MANIFEST}: it is being written"),
        (lambda file: file.write_text("{}"), MANIFEST, f"its {MANIFEST} is damaged \\(Field required\\)"),
        (lambda file: file.write_text(file.read_text().replace('"step": 40', '"step": 9')), MANIFEST, "of step 9"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused_and_its_run_goes_by_the_one_before(
    damage: Callable[[Path], object], file: str, told: str, run: Path, said: Said
) -> None:
    newest = run / "checkpoints/step_40"
    damage(newest / file)
    assert re.search(f"^baton: {newest}: .*{told}", said(newest))
    with pytest.raises(Started):
        said(run)
    (run / "checkpoints/step_20" / MANIFEST).unlink()
    assert "checkpoint" in said(run)


def test_a_checkpoint_of_another_model_than_the_runs_is_refused(run: Path, said: Said, tmp_path: Path) -> None:
    other = load_config([QUICKSTART], ["model.make.num_layers=1"])
    shutil.rmtree(run / "model")
    shutil.move(prepare(other, tmp_path / "other").model_folder, run / "model")
    assert "is of another model: model.layers.1." in said(run)


def test_a_model_that_is_gone_or_damaged_is_named_by_its_path(run: Path, said: Said) -> None:
    config = ["--config", str(run / "config.yaml")]
    cut(run / "model/model.safetensors")
    assert "the weights" in said(run) and said(run / "model", *config).startswith("baton: the weights ")
    (run / "model/tokenizer.json").unlink()
    assert "no tokenizer.json" in said(run)
    (run / "model/config.json").write_text("{")
    assert said(run / "model", *config).startswith(f"baton: {run}/model/config.json is no JSON")
    shutil.rmtree(run / "model")
    assert "no config.json" in said(run)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("gone.jsonl", None, "there is no such file"),
        ("empty.jsonl", "", "there are no rows"),
        ("other.jsonl", '{"prompt": "?", "env_class": "lokup"}\n', "there is no environment 'lokup'"),
    ],
)
def test_a_set_that_cannot_be_played_is_named(
    name: str, content: str | None, told: str, run: Path, said: Said, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    err = said(run, f"data.eval.held_out={tmp_path / name}")
    assert told in err and (str(tmp_path / name) in err or "row 0" in err)


def test_no_set_at_all_is_told_before_anything_is_loaded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "data.eval_make_rows=null"]) == 2
    told = capsys.readouterr()
    assert "there is no evaluation set; add data.eval.NAME=FILE" in told.err and "loading" not in told.out


def test_an_output_that_cannot_be_written_is_named_before_anything_is_evaluated(
    run: Path, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is a folder" in said(run, "--output", str(tmp_path))
    assert f"no folder {tmp_path / 'rum'}" in said(run, "--output", str(tmp_path / "rum" / "o.json"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert "cannot be written" in said(run, "--output", str(tmp_path / "o.json"))


def test_an_evaluation_takes_nothing_that_its_run_may_still_hold() -> None:
    settings = ["agents.port=8090", "weights.transport=ipc"]
    config = beside_a_run(load_config([QUICKSTART], settings))
    assert config.agents is not None
    assert (config.agents.port, config.weights.transport) == (0, "memory")
    assert beside_a_run(load_config([QUICKSTART])) == load_config([QUICKSTART])


def test_a_result_is_replaced_at_once_or_written_through_what_is_no_plain_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.driver.evaluate_model.evaluate", lambda *arguments: [])
    empty = {"path": str(run), "weights": str(run / "checkpoints" / "step_40"), "sets": []}
    for _ in range(2):
        assert main(["eval", str(run), "--output", str(tmp_path / "o.json")]) == 0
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["o.json"]
    assert json.loads((tmp_path / "o.json").read_text()) == empty
    link, target = tmp_path / "link", tmp_path / "target.json"
    link.symlink_to(target)
    target.touch()
    assert main(["eval", str(run), "--output", str(link)]) == 0
    assert json.loads(target.read_text()) == empty and link.is_symlink()
