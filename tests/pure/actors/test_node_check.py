"""What a node must have before a rank or an engine loads there."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import actors.driver.node_check
from actors.driver.node_check import Node, RunFiles, look, unequal_versions
from actors.trainer.actor import TrainerRank
from service.config import Config
from service.errors import UserError
from service.run import checkpoints


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The files of a run as the driver sees them."""
    for name, text in {"model/config.json": "{}", "model/model.safetensors": "weights", "train.jsonl": "rows"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    return tmp_path


def files_of(here: Path) -> RunFiles:
    return RunFiles.of(here / "model", [here / "train.jsonl"], here / "run", 98e9)


SPOILT: dict[str, Callable[[Path], object]] = {
    "has no {here}/model": lambda here: (here / "model").rename(here / "elsewhere"),
    "has no {here}/model/model.safetensors": lambda here: (here / "model" / "model.safetensors").unlink(),
    "has another {here}/model/model.safetensors, of 4 bytes instead of 7": lambda here: (
        here / "model" / "model.safetensors"
    ).write_text("weig"),
    "has no {here}/train.jsonl": lambda here: (here / "train.jsonl").unlink(),
    "cannot write into the run folder {here}/run": lambda here: (here / "run").rmdir(),
}


@pytest.mark.parametrize("lacks", SPOILT)
def test_the_first_thing_that_a_node_lacks_is_one_line_with_node_and_path(
    here: Path, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.driver.node_check.ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    files = files_of(here)
    assert files.problem() is None and look(files, on_gpu=False).problem is None
    SPOILT[lacks](here)
    found = look(files, on_gpu=False)
    assert found.where == "node 10.0.0.7" and found.problem is not None and "\n" not in found.problem
    assert found.problem.startswith(f"{lacks.format(here=here)}; ranks or engines run there")


def test_files_that_a_node_may_not_read_or_write_are_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: dict[str, int] = {}
    monkeypatch.setattr(os, "access", lambda path, mode: refused.get(str(path)) != mode)
    refused[f"{here}/train.jsonl"] = os.R_OK
    assert files_of(here).problem() == f"may not read {here}/train.jsonl"
    refused[f"{here}/train.jsonl"] = os.W_OK
    assert files_of(here).problem() is None, "only the run folder is written"
    refused[f"{here}/run"] = os.W_OK
    assert files_of(here).problem() == f"cannot write into the run folder {here}/run"


def test_a_gpu_with_other_work_and_a_full_or_slow_disk_are_notes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.cuda.unusable_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: ([int(79e9), int(40e9)][gpu], int(80e9)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "H100")
    free = int(checkpoints.MIN_FREE_BYTES / 2)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: next(clock, 2.0)))
    gpu, room, rate = look(files_of(here), on_gpu=True).notes
    assert "40.0 GB in use" in gpu and "10 GB free" in room and "give it 216" in room
    assert "writes 8 MB/s to the disk" in rate and "a checkpoint of 98 GB takes 195 minutes" in rate

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in look(files_of(here), on_gpu=False).notes[-1]


def test_versions_that_differ_between_nodes_are_named() -> None:
    nodes = [Node(f"node {n}", versions={("torch", "2.11"), ("vllm", "1.0")}) for n in range(3)]
    assert [*unequal_versions(nodes)] == []
    nodes[1] = nodes[1]._replace(versions={("torch", "2.10")})
    assert [*unequal_versions(nodes)] == [
        "the nodes differ in torch 2.10, torch 2.11, vllm 1.0: install the same everywhere"
    ]


def test_a_rank_that_was_given_a_gpu_never_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # without the check the rank would wait for the others so long
    config = Config.model_validate({"trainer": {"collective_deadline": 1.0}})
    rank = TrainerRank(config.model_dump_json(), 3, None, True)
    with pytest.raises(UserError, match=r"trainer-3 has a GPU of node .*, but PyTorch cannot use it: CUDA found no de"):
        rank.load(("127.0.0.1", 1), "no such model", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert TrainerRank(Config().model_dump_json(), 0)._device.type == "cpu", "without one it leaves GPUs alone"


def test_a_pytorch_without_cuda_is_refused_on_a_machine_with_gpus(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    said = look(files_of(here), on_gpu=True).problem
    assert said is not None and "has GPUs, but PyTorch cannot use them: it was built without CUDA" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def test_a_driver_that_is_too_old_is_refused_in_one_line_with_its_version(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_driver() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old (found version 12040).\nPlease update", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    said = look(files_of(here), on_gpu=True).problem
    assert said is not None and "too old (found version 12040). (PyTorch's CUDA is 13.0)" in said and "\n" not in said
