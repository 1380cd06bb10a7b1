"""What a run leaves behind can be read back, also when it was killed while writing."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer

from actors.driver.run import run
from service.cli import main
from service.cli.logs import _files as logs_of
from service.cli.status import run_status
from service.config import Config, WandbConfig, load_config, resolved_yaml
from service.errors import RunFailed, UserError
from service.files import LOCK
from service.rollout.run_secret import SECRET_FILE
from service.run.checkpoints import MANIFEST, Checkpoints
from service.run.folder import (
    ADDRESS,
    CHECKPOINTS,
    CONFIG,
    DRIVER_LOG,
    LOGS,
    RUNS,
    SUMMARY,
    TARGETS,
    find_run,
    new_run_folder,
    read_lines,
)
from service.run.records import writer
from service.run.records.writer import TABLE_STEPS, RunWriter


def step(number: int, **more: float) -> dict[str, float]:
    return {
        "trainer/global_step": number,
        "reward/avg_raw_reward": number / 10,
        "async/staleness_mean": 0.5,
        "generate/batch_padded_seq_len": 60.0,
        **more,
    }


def test_a_second_run_of_the_same_name_gets_its_own_folder(tmp_path: Path) -> None:
    names = [new_run_folder(tmp_path / "runs", "quickstart").name for _ in range(3)]
    assert names == ["quickstart", "quickstart-2", "quickstart-3"]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run\.dir: "):
        new_run_folder(tmp_path / "file", "quickstart")


def test_the_status_without_a_name_is_that_of_the_run_that_began_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 2 and "there is no run in runs/" in capsys.readouterr().err
    for name in ("b", "a", "c"):
        folder = new_run_folder(RUNS, name)
        (folder / SUMMARY).write_text('{"state": "finished", "steps": 3}')
        (folder / CONFIG).touch()
        os.utime(folder / CONFIG, (0, {"b": 1, "a": 9, "c": 5}[name]))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith(f"{RUNS / 'a'}: finished after 3 optimizer steps")


def test_prometheus_has_a_file_of_targets_for_each_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def seen(source: Path, target: Path) -> None:  # of a file that is half written, Prometheus would complain
        assert source.parent.name != TARGETS
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    writers = [RunWriter(tmp_path / name) for name in ("quickstart", "quickstart-2")]
    for number, folder in enumerate(writers):
        folder.write_targets([{"targets": [f"127.0.0.1:{number}"], "labels": {}}])
    files = {file.name: json.loads(file.read_text()) for file in (tmp_path / TARGETS).iterdir()}
    assert files["quickstart-2.json"] == [{"targets": ["127.0.0.1:1"], "labels": {}}]
    writers[1].delete_targets()
    assert [file.name for file in (tmp_path / TARGETS).iterdir()] == ["quickstart.json"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_in_a_run_folder_is_refused_and_not_read(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    for folder in (LOGS, f"{CHECKPOINTS}/step_1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / CONFIG).touch()
    for name, read in (
        (SUMMARY, lambda: run_status(str(tmp_path))),
        (ADDRESS, lambda: run_status(str(tmp_path))),
        (LOCK, lambda: run_status(str(tmp_path))),
        (f"{LOGS}/{DRIVER_LOG}", lambda: logs_of(tmp_path / LOGS, "driver")),
        (f"{CHECKPOINTS}/step_1/{MANIFEST}", lambda: Checkpoints(tmp_path / CHECKPOINTS, 1).manifest(1)),
        (SECRET_FILE, lambda: find_run(tmp_path)),
    ):
        make(tmp_path / name)
        with pytest.raises(UserError):
            read()
        (tmp_path / name).unlink()


def test_a_folder_that_is_renamed_under_its_run_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename_and_go_on(config: Config, folder: RunWriter, *more: object) -> int:
        folder.path.rename(tmp_path / "renamed")
        folder.begin(resolved_yaml(config))
        return 0

    monkeypatch.setattr("actors.driver.run._run", rename_and_go_on)
    config = load_config([Path("configs/quickstart.yaml")], [f"run.dir={tmp_path / 'runs'}"])
    with pytest.raises(RunFailed, match=r"runs/quickstart: the folder was renamed or deleted while its run went on$"):
        run(config)


def test_a_step_is_one_flat_json_line_and_one_point_per_curve(tmp_path: Path) -> None:
    folder = RunWriter(tmp_path)
    folder.log_step({**step(1), "trainer/global_step": np.int64(1), "timing/step": np.float32(0.5)})
    folder.log_step(step(2, **{"policy/policy_loss": math.nan}))
    folder.close()
    with (tmp_path / "metrics.jsonl").open("a") as killed_writer:
        killed_writer.write('{"trainer/glo')
    lines = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [line["trainer/global_step"] for line in lines] == [1, 2]
    assert lines[0]["timing/step"] == 0.5 and lines[1]["policy/policy_loss"] is None
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    points = board.Scalars("reward/avg_raw_reward")
    assert [(point.step, round(point.value, 3)) for point in points] == [(1, 0.1), (2, 0.2)]
    assert "policy/policy_loss" not in board.Tags()["scalars"]


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_the_curve_is_drawn_from_however_many_steps_there_are(tmp_path: Path, steps: int) -> None:
    folder = RunWriter(tmp_path)
    for number in range(1, steps + 1):
        missing = float("nan") if number % 3 else 2.0
        folder.log_step(step(number, **{"reward/avg_pass_at_8": 1.0, "async/staleness_max": missing}))
    folder.plot()
    folder.close()
    picture = (tmp_path / "learning_curve.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_trajectories_are_kept_until_the_file_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "TRAJECTORIES_BYTES", 50)
    folder = RunWriter(tmp_path)
    trajectories = [{"id": f"group={number}/sample=0/attempt=0"} for number in range(10)]
    for some, lines in ((trajectories[:1], 1), (trajectories[1:], 2), (trajectories, 2)):
        folder.append_trajectories(some)
        assert len(list(read_lines(tmp_path / "trajectories.jsonl"))) == lines


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Takes the place of the package."""
    wandb = MagicMock()
    wandb.errors.Error = ValueError
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_wandb_knows_a_resumed_run_and_takes_one_of_its_name_elsewhere_for_another(
    tmp_path: Path, wandb: MagicMock
) -> None:
    for parent in ("one", "one", "another"):
        folder = RunWriter(tmp_path / parent / "quickstart")
        folder.begin("", WandbConfig(project="p"))
        folder.log_step(step(1))
        folder.close()
    began = [call.kwargs for call in wandb.init.call_args_list]
    assert {each["name"] for each in began} == {"quickstart"}
    first, resumed, elsewhere = (each["id"] for each in began)
    assert first == resumed != elsewhere


@pytest.mark.parametrize("where", ["environment", "netrc", "nowhere", "switched off"])
def test_wandb_is_online_where_there_is_a_key_and_gets_texts(
    where: str, made_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb: MagicMock
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if where == "netrc":
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password made-up\n")
    elif where != "nowhere":
        monkeypatch.setenv("WANDB_API_KEY", "made-up")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if where == "switched off":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    folder = RunWriter(tmp_path / "r")
    folder.begin("", WandbConfig(), made_model)
    words = Tokenizer.from_file(str(made_model / "tokenizer.json"))
    turn = {"prompt_ids": words.encode("look", add_special_tokens=False).ids, "response_ids": [5]}
    record = {"id": "group=1/sample=0/attempt=0", "fate": "trained", "return": 1.0, "advantage": 0.5}
    record |= {"stop_reason": "stop", "sampled_tokens": 1, "steps": [turn]}
    for number in (TABLE_STEPS - 1, TABLE_STEPS):
        folder.append_trajectories([record])
        folder.log_step(step(number))
    folder.close()
    (began,) = wandb.init.call_args_list
    assert began.kwargs["mode"] == ("offline" if where == "nowhere" else None)  # None: as wandb's variables say
    first, second = (call.args[0] for call in wandb.init.return_value.log.call_args_list)
    assert "trajectories" not in first and second["trajectories"] is wandb.Table.return_value
    ((row,),) = [call.kwargs["data"] for call in wandb.Table.call_args_list]
    assert row[0] == record["id"] and row[-1] == words.decode([*turn["prompt_ids"], 5], skip_special_tokens=False)
