"""The trainer's end of weights that go from GPU to GPU: what it sends or shares, of which version, in which order."""

from __future__ import annotations

import inspect
import json
import sys
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing.reductions as reductions

from actors.trainer.actor import TrainerRank
from actors.weights.checksum import EMPTY_CHECKSUM, PolicySize, checksum_of
from actors.weights.cuda_ipc import encode_handles, ipc_update_info
from actors.weights.nccl_broadcast import NcclSender, decode_announcement, encode_announcement, init_info
from service.config import Config, WeightsConfig

WEIGHTS = {f"layers.{n}.weight": torch.full((2, n + 1), float(n), dtype=torch.bfloat16) for n in range(5)}
SIZE = PolicySize(sum(tensor.numel() for tensor in WEIGHTS.values()), tied=False)
CPU = torch.device("cpu")


class Vllm:
    """vLLM's functions of the sending end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined: list[dict[str, Any]] = []
        self.sent: dict[str, Any] = {}
        self.done = Event()
        folder = "vllm.distributed.weight_transfer"
        for name in ("vllm", "vllm.distributed", folder, f"{folder}.nccl_common", f"{folder}.packed_tensor"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        common: Any = sys.modules[f"{folder}.nccl_common"]
        packed: Any = sys.modules[f"{folder}.packed_tensor"]
        common.trainer_init = self._init
        packed.packed_nccl_broadcast_producer = self._send
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def _init(self, info: dict[str, Any]) -> str:
        self.joined.append(info)
        return f"group {len(self.joined)}"

    def _send(self, iterator: Any, post_iter_func: Any, **how: Any) -> None:
        self.sent = how | {"items": [(item[0], post_iter_func(item)) for item in iterator]}
        self.done.set()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


def test_the_trainer_sends_the_announced_tensors_in_their_order_cut_as_the_engines_cut_them(vllm: Vllm) -> None:
    point = ("10.0.0.1", 29500)
    sender, theirs = NcclSender(point, workers=2), init_info(point, workers=2)
    assert vllm.joined == [{name: theirs[name] for name in ("master_address", "master_port", "world_size")}]
    sender.begin(WEIGHTS, CPU)
    assert vllm.done.wait(60)
    sent = vllm.sent
    assert (sent["group"], sent["src"]) == ("group 1", 0)
    assert sent["src"] < theirs["rank_offset"] < theirs["world_size"] == 3
    assert sent["buffer_size_bytes"] == theirs["packed_buffer_size_bytes"]
    assert sent["num_buffers"] == theirs["packed_num_buffers"]
    data = encode_announcement(WEIGHTS)
    specs = decode_announcement(data, checksum_of(data), SIZE)
    assert [spec.name for spec in specs] == [name for name, _ in sent["items"]] == list(WEIGHTS)
    for spec, (name, on_device) in zip(specs, sent["items"], strict=True):
        assert torch.equal(on_device, WEIGHTS[name])
        assert (spec.shape, spec.n_bytes) == (tuple(on_device.shape), on_device.nbytes)


def rank_of(transport: str) -> TrainerRank:
    rank = TrainerRank(Config(weights=WeightsConfig(transport=transport)).model_dump_json(), 0)  # type: ignore[arg-type]
    rank._learner = SimpleNamespace(weights=lambda everywhere=False: WEIGHTS)  # type: ignore[assignment]
    return rank


def test_a_rank_sends_only_the_version_that_was_asked_for(vllm: Vllm) -> None:
    rank = rank_of("nccl")
    rank.join_engine("generator-0", ("10.0.0.1", 29500))
    assert not rank.begin_send("generator-0", 7), "nothing was gathered yet"
    data, checksum = rank.weights(7)
    assert (data.tobytes(), checksum) == (encode_announcement(WEIGHTS), checksum_of(encode_announcement(WEIGHTS)))
    assert rank.begin_send("generator-0", 7)
    assert vllm.done.wait(60)
    rank.weights(8)
    vllm.done.clear()
    assert not rank.begin_send("generator-0", 7)
    assert not vllm.done.is_set()


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
    assert rank.weights(7)[1] == rank.ipc_handles(6)[1] == EMPTY_CHECKSUM
    data, checksum = rank.ipc_handles(7)
    assert did == ["synchronize", *["handle"] * 5]
    did.clear()
    assert data.tobytes() == encode_handles(WEIGHTS, CPU)
    info, n_bytes = ipc_update_info(data, checksum, SIZE)
    assert (info["names"], info["gpu"], n_bytes) == (list(WEIGHTS), "0b4a", sum(t.nbytes for t in WEIGHTS.values()))
    assert [handle["storage_handle"] for handle in info["handles"]] == [f"0{number}ff" for number in range(5)]
    assert [handle["tensor_offset"] for handle in json.loads(data.tobytes())["handles"]] == list(range(5))
    rank.weights(8)
    assert rank.ipc_handles(7)[1] == EMPTY_CHECKSUM


def test_weights_by_memory_travel_with_their_checksum() -> None:
    data, checksum = rank_of("memory").weights(7)
    assert isinstance(data, np.ndarray)
    assert checksum == checksum_of(data.tobytes()) != EMPTY_CHECKSUM
