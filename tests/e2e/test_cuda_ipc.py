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
from actors.weights.policy_tensors import PolicySize, decode_announcement
from service.config import Config, WeightsConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports for its models
]

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


NAMED = [arguments(tensor, number) for number, tensor in enumerate(WEIGHTS.values())]


def test_vllms_engine_loads_every_tensor_from_the_memory_that_its_rank_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine

    from actors.engine.worker_extension import IpcUpdateInfo, IpcWeightEngine

    did, opened = list[str](), list[tuple[Any, ...]]()
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    memory = {
        named[names.index("storage_handle")]: tensor for named, tensor in zip(NAMED, WEIGHTS.values(), strict=True)
    }
    gpu = SimpleNamespace(uuid="0b4a")

    def reduced(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        (number,) = (n for n, weight in enumerate(WEIGHTS.values()) if weight.data_ptr() == tensor.data_ptr())
        did.append(f"handle {number}")
        return rebuild_cuda_tensor, NAMED[number]

    def gathered(everywhere: bool = False) -> dict[str, torch.Tensor]:
        did.append(f"gather everywhere={everywhere}")
        return WEIGHTS

    def opens(*args: Any) -> torch.Tensor:
        opened.append(args)
        return memory[args[names.index("storage_handle")]]

    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", reduced)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: did.append("free what no engine has open"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: did.append("wait for the GPU"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", opens)

    rank = TrainerRank(Config(weights=WeightsConfig(transport="ipc")).model_dump_json(), 0)
    rank._learner = SimpleNamespace(policy=SimpleNamespace(weights=gathered))  # type: ignore[assignment]
    assert rank.ipc_handles(7) is None and rank.weights(7) is None
    assert did == ["free what no engine has open", "gather everywhere=True"], "no handle before an engine asks for it"
    shared = [rank.ipc_handles(7) for _ in range(2)]
    assert did[2:] == ["wait for the GPU", "handle 0", "handle 1"] * 2, "new handles for each update"
    assert shared[0] == shared[1] and shared[0] is not None
    with pytest.raises(ValueError, match="16 numbers, but the policy has 20"):
        decode_announcement(*shared[0], PolicySize(20, tied=False))
    info, n_bytes = decode_announcement(*shared[0], PolicySize(16, tied=False))

    loaded = dict[str, torch.Tensor]()
    engine = IpcWeightEngine.__new__(IpcWeightEngine)
    engine.model, engine.device, engine.packed = (
        SimpleNamespace(load_weights=loaded.update),
        torch.device("cuda", 0),
        False,
    )
    engine.receive_weights(IpcUpdateInfo(**json.loads(json.dumps(info))))
    assert (loaded, n_bytes, opened) == (WEIGHTS, 32, NAMED)

    gpu.uuid = "another"
    with pytest.raises(ValueError, match="not found for GPU UUID another"):
        engine.receive_weights(IpcUpdateInfo(**info))
