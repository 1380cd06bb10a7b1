"""What a run reads before it starts is read whole and refused in one line."""

import json
import socket
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from actors.driver.prepare import prepare
from actors.driver.run import run
from service.cli import main
from service.config import Config, LoraConfig, load_config
from service.errors import UserError
from service.learn.model.adapter_folder import ADAPTER_WEIGHTS, Base, write_adapter
from service.learn.model.hf_config import read_config
from service.learn.model.policy_model import trained_shapes
from service.learn.model.router_replay import routing_of_model
from service.rollout.chat.tokenizer import make_tokenizer

QUICKSTART = "configs/quickstart.yaml"


def pointed_at(model: Path, *overrides: str) -> Config:
    return load_config([QUICKSTART], ["model.make=null", f"model.path={model}", *overrides])


def test_a_model_folder_of_the_runs_own_making_is_read_like_any_other(model: Path, tmp_path: Path) -> None:
    prepared = prepare(pointed_at(model), tmp_path / "run")
    assert prepared.model_folder == model and prepared.routing == ((), 0, 0)


@pytest.mark.parametrize("on", [True, False])
def test_no_room_is_kept_for_routed_experts_that_nobody_records(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    mixture = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, num_experts=8, num_experts_per_tok=2)
    monkeypatch.setattr(
        "actors.driver.prepare.routing_of_model", lambda _, recorded: routing_of_model(mixture, recorded)
    )
    prepared = prepare(pointed_at(model, f"generator.record_experts={str(on).lower()}"), tmp_path / "run")
    assert (prepared.routing.token_bytes > 0) == on


def test_a_teacher_that_reads_other_tokens_or_teaches_no_row_is_refused_before_anything_starts(
    model: Path, tmp_path: Path
) -> None:
    other, empty = tmp_path / "other", tmp_path / "empty"
    make_tokenizer(other, ["other", "words"])
    empty.mkdir()
    for folder, reason in ((other, "is another one than the policy's"), (empty, "has no tokenizer.json")):
        teacher = [f"scorers.big={{kind: teacher, model: {folder}}}", "algorithm.teacher={}"]
        with pytest.raises(UserError, match=rf"^scorers\.big: the .*{reason}"):
            prepare(pointed_at(model, *teacher), tmp_path / "run")
    with pytest.raises(UserError, match="no row of the dataset names a teacher in its column 'who'"):
        prepare(pointed_at(model, *teacher, "algorithm.teacher.column=who"), tmp_path / "run")


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        ("model.lora.rank=4", None),
        ("model.lora.rank=8", "model.lora.rank: the adapter {} has 4; set that"),
        ("of another model", "is of an adapter for another model than"),
        ("cut off", "model.adapter: {}/adapter_model.safetensors cannot be read"),
    ],
)
def test_an_adapter_to_begin_with_is_refused_by_the_validation_in_the_line_of_a_run(
    setting: str, wrong: str | None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora, adapter = LoraConfig(rank=4, targets=("q_proj", "k_proj")), tmp_path / "adapter"
    tensors = {name: torch.zeros(shape) for name, shape in trained_shapes(read_config(model), lora).items()}
    write_adapter(adapter, Base.of(model), lora, tensors)
    if setting == "cut off":
        (adapter / ADAPTER_WEIGHTS).write_bytes(b"\xff")
    if setting == "of another model":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config, indent=7))
    words = ["model.make=null", "model.warm_start=null", f"model.path={model}", f"model.adapter={adapter}"]
    words += ["model.lora={rank: 4, targets: [q_proj, k_proj]}", *([setting] if "=" in setting else [])]
    code = main(["config", "validate", "--config", QUICKSTART, *words])
    said = capsys.readouterr().err
    if wrong is None:
        assert code == 0 and prepare(load_config([QUICKSTART], words), tmp_path / "run")
    else:
        with pytest.raises(UserError) as refused:
            prepare(load_config([QUICKSTART], words), tmp_path / "run")
        line = str(refused.value)
        assert wrong.format(adapter) in line and code == 2 and said.count("\n") == 1
        assert said.endswith(f"{line.partition(': ')[2]}\n") and line.partition(":")[0] in said


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[]"),
        ("config.json", '{"model_type": "qwen3", "vocab_size": "many"}'),
        ("model.safetensors", "no safetensors"),
        ("model.safetensors", None),
        ("model.safetensors.index.json", '{"weight_map": 3}'),
    ],
)
def test_a_damaged_file_of_a_model_is_one_line(file: str, text: str | None, model: Path, tmp_path: Path) -> None:
    """Without a text the last byte is cut off."""
    (model / file).write_bytes((model / file).read_bytes()[:-1] if text is None else text.encode())
    with pytest.raises(UserError, match=rf"^model\.path: .*{file}") as caught:
        prepare(pointed_at(model), tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_made_model_that_no_memory_holds_is_refused_before_it_is_made(tmp_path: Path) -> None:
    sizes = ["model.make.hidden_size=4096", "model.make.num_layers=64"]
    with pytest.raises(UserError, match=r"model\.make: training \d+ parameters takes \d+ MiB, \d+ MiB are free"):
        prepare(load_config([QUICKSTART], sizes), tmp_path / "run")
    assert not (tmp_path / "run/model/model.safetensors").exists()


def test_a_run_that_is_refused_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError):
        run(pointed_at(model, f"run.dir={tmp_path / 'runs'}", "metrics.port=0"))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_taken_port_is_refused_before_ray_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["run", "--config", QUICKSTART, f"metrics.port={port}", f"run.dir={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr()
    assert f"override metrics.port={port}: port {port} on 127.0.0.1 is in use" in said.err and not said.out
    assert not (tmp_path / "runs").exists()
