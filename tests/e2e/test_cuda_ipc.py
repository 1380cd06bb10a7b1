"""Weights within a GPU, as far as a machine without one can tell: what vLLM opens is what the trainer's rank named."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from actors.trainer.actor import TrainerRank
from actors.weights.cuda_ipc import Handle, handle_of
from actors.weights.policy_tensors import PolicySize, checksum_of, decode_announcement, encode_announcement
from service.config import Config, WeightsConfig

pytestmark = [pytest.mark.slow, pytest.mark.full]

GPU = "0b4a"
WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
    "model.norm.weight": torch.full((4,), 7, dtype=torch.bfloat16),
}


def arguments(tensor: torch.Tensor, number: int) -> tuple[Any, ...]:
    """What torch says of a tensor on a GPU, with a handle that names the tensor."""
    handle, counter, event = (bytes([number, kind, 0xFF]) for kind in range(3))
    return (
        torch.Tensor, tensor.size(), tensor.stride(), 2 * number, TypedStorage, tensor.dtype, 0,
        handle, 512, 1024 * number, False, counter, 3 + number, event, True,
    )  # fmt: skip


def handles() -> list[Handle]:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    made = (arguments(tensor, number) for number, tensor in enumerate(WEIGHTS.values()))
    return [handle_of(dict(zip(names, of, strict=True))) for of in made]


def message() -> tuple[bytes, int]:
    data = encode_announcement(WEIGHTS, gpu=GPU, handles=handles())
    return data, checksum_of(data)


class GatheringPolicy:
    """A policy whose weights are gathered without a GPU."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def weights(self, everywhere: bool = False) -> dict[str, torch.Tensor]:
        self.events.append(f"gather everywhere={everywhere}")
        return WEIGHTS


class Gpu:
    uuid = GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Torch's calls on a GPU, replaced and recorded in order."""
    events: list[str] = []
    numbers = {tensor.data_ptr(): number for number, tensor in enumerate(WEIGHTS.values())}

    def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        number = numbers[tensor.data_ptr()]
        events.append(f"handle {number}")
        return rebuild_cuda_tensor, arguments(tensor, number)

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: events.append("free what no engine has open"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait for the GPU"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu())
    return events


def gathered(events: list[str], version: int) -> TrainerRank:
    """A rank that published this version by CUDA IPC."""
    config = Config().model_copy(update={"weights": WeightsConfig(transport="ipc")})
    rank = TrainerRank(config.model_dump_json(), 0)
    rank._learner = SimpleNamespace(policy=GatheringPolicy(events))  # type: ignore[assignment]
    assert rank.weights(version) is None, "nothing is published before an engine asks for handles"
    return rank


def test_a_rank_shares_the_weights_that_it_gathered_on_its_gpu_with_new_handles_for_each_update(gpu: list[str]) -> None:
    rank = gathered(gpu, 7)
    assert gpu == ["free what no engine has open", "gather everywhere=True"]
    for _ in range(2):
        gpu.clear()
        assert rank.ipc_handles(7) == message()
        assert gpu == ["wait for the GPU", "handle 0", "handle 1"]
    gpu.clear()
    rank.weights(8)
    assert rank.ipc_handles(7) is None
    assert gpu == ["free what no engine has open", "gather everywhere=True"], "no handle of weights that were replaced"
    assert rank.ipc_handles(8) == message()


def shared(rank: TrainerRank, version: int) -> tuple[bytes, int]:
    found = rank.ipc_handles(version)
    assert found is not None
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports for its models
def test_vllms_engine_loads_every_tensor_from_the_memory_that_its_rank_named(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import ipc_engine

    from actors.engine.worker_extension import IpcUpdateInfo, IpcWeightEngine

    memory = dict(zip((arguments(t, n)[7] for n, t in enumerate(WEIGHTS.values())), WEIGHTS.values(), strict=True))
    opened: list[tuple[Any, ...]] = []

    def open_memory(*args: Any) -> torch.Tensor:
        opened.append(args)
        return memory[args[7]]

    class Model:
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            self.loaded = dict(weights)

    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", open_memory)
    engine = IpcWeightEngine.__new__(IpcWeightEngine)
    engine.model, engine.device, engine.packed = Model(), torch.device("cuda", 0), False
    info, n_bytes = decode_announcement(*shared(gathered(gpu, 7), 7), PolicySize(16, tied=False))
    engine.receive_weights(IpcUpdateInfo(**json.loads(json.dumps(info))))
    assert n_bytes == 32
    assert engine.model.loaded == WEIGHTS
    assert opened == [arguments(tensor, number) for number, tensor in enumerate(WEIGHTS.values())]

    monkeypatch.setattr(Gpu, "uuid", "another")
    with pytest.raises(ValueError, match="not found for GPU UUID another"):
        engine.receive_weights(IpcUpdateInfo(**info))


def test_anything_but_the_whole_policy_is_refused() -> None:
    data, checksum = message()
    with pytest.raises(ValueError, match="16 numbers, but the policy has 20"):
        decode_announcement(data, checksum, PolicySize(20, tied=False))
    with pytest.raises(ValueError, match="have the checksum"):
        decode_announcement(data, checksum + 1, PolicySize(16, tied=False))


def test_a_rank_shares_only_the_version_that_was_asked_for() -> None:
    rank = TrainerRank(Config().model_dump_json(), 0)
    rank._learner = GatheringPolicy([])  # type: ignore[assignment]
    assert rank.ipc_handles(7) is None
