"""What `baton eval` takes a path for."""

from pathlib import Path

import pytest

from service.config import load_config
from service.errors import UserError
from service.files import previous_folder
from service.run.checkpoints import Manifest
from service.run.folder import FINAL, WARM_START
from service.run.preparing.eval_target import eval_target
from tests.pure.conftest import Refused


def run_folder(path: Path, final: bool) -> Path:
    for file in ("config.yaml", "model/config.json", "checkpoints/step_40/manifest.json"):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).touch()
    (path / "config.yaml").write_text("model: {make: {}}\n")
    if final:
        (path / "final").mkdir()
        (path / "final" / "config.json").touch()
    return path


def test_a_run_means_its_final_weights_and_without_them_its_newest_checkpoint(tmp_path: Path) -> None:
    whole, stopped = run_folder(tmp_path / "a", final=True), run_folder(tmp_path / "b", final=False)
    assert (eval_target(whole).model, eval_target(whole).settings) == (whole / "final", [whole / "config.yaml"])
    found = eval_target(stopped)
    assert (found.model, found.step, found.checkpoints.path(0).parent) == (None, None, stopped / "checkpoints")
    assert found.begun_with(load_config(found.settings).model) == stopped / "model"
    warmed = load_config(found.settings, ["model.lora={}", "model.warm_start={}"])
    assert found.begun_with(warmed.model) == stopped / WARM_START, "the model that the adapter was added to"
    assert eval_target(whole).weights(None) == whole / "final"
    manifest = Manifest(step=40, journal_position=0, files={})
    assert found.weights(manifest) == stopped / "checkpoints" / "step_40"
    (whole / FINAL).rename(previous := previous_folder(whole / FINAL))
    assert eval_target(whole).model == previous, "they were being replaced when their run was killed"


def test_a_checkpoint_or_model_folder_means_itself_and_only_a_runs_own_brings_a_configuration(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", final=True)
    found = eval_target(run / "checkpoints" / "step_40")
    assert (found.step, found.model, found.run, found.settings) == (40, None, run, [run / "config.yaml"])
    assert (eval_target(run / "final").model, eval_target(run / "final").run) == (run / "final", run)
    assert (eval_target(run / "model").model, eval_target(run / "model").settings) == (run / "model", [])


@pytest.mark.parametrize("words", [["eval"], ["init"]], ids=lambda words: words[0])
def test_a_link_that_leads_to_itself_is_one_line(tmp_path: Path, refused: Refused, words: list[str]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert str(loop) in refused(*words, loop)


def test_an_unrelated_folder_of_a_runs_name_does_not_hide_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "runs" / "q", final=True)
    (tmp_path / "q").mkdir()
    monkeypatch.chdir(tmp_path)
    assert eval_target(Path("q")).run == run


def test_a_folder_in_which_no_run_was_started_is_not_said_to_come_to_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="no run was started in this folder"):
        eval_target(tmp_path).manifest()
