"""The trainer's end of weights that go from GPU to GPU: what it sends or shares, of which version, in which order."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing.reductions as reductions
from safetensors.torch import load as load_tensors

from actors.driver.prepare import prepare
from actors.trainer.actor import TrainerRank
from actors.weights.cuda_ipc import encode_handles
from actors.weights.part import Source
from actors.weights.policy_tensors import (
    AdapterShapes,
    PolicySize,
    checksum_of,
    decode_announcement,
)
from actors.weights.pulled import WeightFile
from service.config import Config, LoraConfig, WeightsConfig, load_config
from service.learn.learner import Learner
from tests.families.engine import small_model
from tests.pure.actors.fakes import on_ranks
from tests.pure.learn.builders import settings

WEIGHTS = {f"layers.{n}.weight": torch.full((2, n + 1), float(n), dtype=torch.bfloat16) for n in range(5)}
SIZE = PolicySize(sum(tensor.numel() for tensor in WEIGHTS.values()), tied=False)
CPU = torch.device("cpu")


def rank_of(transport: str) -> TrainerRank:
    weights = WeightsConfig(transport=transport)  # type: ignore[arg-type]
    rank = TrainerRank(Config(weights=weights).model_dump_json(), 0)
    rank._learner = SimpleNamespace(  # type: ignore[assignment]
        policy=SimpleNamespace(
            dtype=torch.bfloat16,
            weights=lambda everywhere=False: WEIGHTS,
            shards=lambda: on_ranks(WEIGHTS)[0],
        ),
    )
    return rank


def test_a_rank_shares_the_newest_version_whose_work_on_the_gpu_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)

    def reduced(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        did.append("handle")
        number = len(did) - 2
        octets = {name: bytes([number, 255]) for name in names if name.endswith("_handle")}
        return None, tuple(octets.get(name, number) for name in names)

    monkeypatch.setattr(reductions, "reduce_tensor", reduced)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: did.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0b4a"))
    rank = rank_of("ipc")
    assert rank.weights(7) is None and rank.ipc_handles(6) is None
    data, checksum = rank.ipc_handles(7) or (b"", 0)
    assert did == ["synchronize", *["handle"] * 5]
    did.clear()
    assert data == encode_handles(WEIGHTS, CPU)
    info, n_bytes = decode_announcement(data, checksum, SIZE)
    assert [name for name, *_ in info["tensors"]] == list(WEIGHTS)
    assert (info["gpu"], n_bytes) == ("0b4a", sum(tensor.nbytes for tensor in WEIGHTS.values()))
    assert [handle["storage_handle"] for handle in info["handles"]] == [f"0{number}ff" for number in range(5)]
    assert [handle["tensor_offset"] for handle in info["handles"]] == list(range(5))
    rank.weights(8)
    assert rank.ipc_handles(7) is None


def file_of(rank: TrainerRank, version: int, size: int = 64) -> bytes:
    """The file that a rank gives out in buckets of this size."""
    source, data = rank.weights(version), bytearray()
    assert isinstance(source, Source)
    for start in range(0, source.part.n_bytes, size):
        message, bucket = rank.bucket(version, start, min(start + size, source.part.n_bytes))
        assert bucket is not None and message is not None
        assert (bucket.checksum, sum(n for _, n in bucket.spans)) == (checksum_of(message), len(message))
        data += message.tobytes()
    file = WeightFile(version, [source])  # as engines of the rank's host read it
    assert file.read(0, file.n_bytes).numpy().tobytes() == data
    return bytes(data)


@pytest.mark.parametrize("size", [8, 1 << 20])
def test_a_rank_gives_out_the_newest_version_as_buckets_of_a_safetensors_file(size: int) -> None:
    rank = rank_of("memory")
    assert rank.bucket(7, 0, 8)[1] is None, "nothing was gathered yet"
    for version in (7, 8, 9):
        read = load_tensors(file_of(rank, version, size))
        assert sorted(read) == sorted(WEIGHTS)
        assert all(
            torch.equal(read[name], weight) and read[name].dtype == weight.dtype for name, weight in WEIGHTS.items()
        )
        assert rank.bucket(version - 1, 0, 8)[1] is None


def loaded(config: Config, folder: Path, adapter: bool) -> TrainerRank:
    rank = TrainerRank(config.model_dump_json(), 0)
    rank.load(("", 0), str(folder), None, adapter)
    return rank


def shapes_of(rank: TrainerRank) -> AdapterShapes:
    return {name: tuple(tensor.shape) for name, tensor in load_tensors(file_of(rank, 7, 1 << 20)).items()}


def test_a_rank_trains_all_weights_in_the_warm_start_and_publishes_then_the_adapter_that_engines_expect(
    tmp_path: Path,
) -> None:
    lora = ["model.lora.rank=3", "model.lora.targets=[q_proj,o_proj,up_proj,down_proj]"]
    config = load_config(["configs/quickstart.yaml"], [*lora, "trainer.ranks=1", "model.make.hidden_size=64"])
    made = prepare(config, tmp_path / "run").model_folder
    whole = loaded(config, made, adapter=False)
    whole.export(str(tmp_path / "warm_start"))
    PolicySize.of_folder(made).check(shapes_of(whole).items())
    rank = loaded(config, tmp_path / "warm_start", adapter=True)
    assert shapes_of(rank) == PolicySize.of_folder(tmp_path / "warm_start", config.model.lora).adapter


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "glm4_moe"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3, targets=("q_proj",))])
def test_engines_expect_what_the_trainer_of_a_folder_with_more_than_its_weights_sends(
    tmp_path: Path, family: str, lora: LoraConfig | None
) -> None:
    """Image models and buffers."""
    small_model(family, 0, multimodal=family != "glm4_moe").save_pretrained(tmp_path)
    sent = Learner(settings(lora=lora), tmp_path, CPU, 0, 1).policy.weights()
    assert sent is not None
    PolicySize.of_folder(tmp_path, lora).check((name, tensor.shape) for name, tensor in sent.items())
