"""Weights within a GPU, as far as a machine without one can tell: what vLLM opens is what the trainer's rank named."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from torch.storage import TypedStorage

from actors.trainer.actor import TrainerRank
from actors.weights.checksum import EMPTY_CHECKSUM, PolicySize, TensorSpec, checksum_of
from actors.weights.cuda_ipc import Handle, handle_of, ipc_update_info, rebuild_arguments
from service.config import Config

pytestmark = pytest.mark.slow

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
    data = json.dumps({"tensors": TensorSpec.of_weights(WEIGHTS), "gpu": GPU, "handles": handles()}).encode()
    return data, checksum_of(data)


def test_a_handle_that_travelled_as_plain_values_rebuilds_what_torch_would() -> None:
    for number, (tensor, handle) in enumerate(zip(WEIGHTS.values(), handles(), strict=True)):
        travelled = json.loads(json.dumps(handle))
        assert rebuild_arguments(travelled, TensorSpec("w", "bfloat16", tuple(tensor.shape))) == arguments(
            tensor, number
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports for its models
def test_vllms_engine_loads_every_tensor_from_the_memory_that_its_handle_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine

    from actors.weights.worker_extension import IpcUpdateInfo, IpcWeightEngine

    memory = dict(zip((arguments(t, n)[7] for n, t in enumerate(WEIGHTS.values())), WEIGHTS.values(), strict=True))
    opened: list[tuple[Any, ...]] = []

    def open_memory(*args: Any) -> torch.Tensor:
        opened.append(args)
        return memory[args[7]]

    class Model:
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            self.loaded = dict(weights)

    class Gpu:
        uuid = GPU

    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", open_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu())
    engine = IpcWeightEngine.__new__(IpcWeightEngine)
    engine.model, engine.device, engine.packed = Model(), torch.device("cuda", 0), False
    info, n_bytes = ipc_update_info(*message(), PolicySize(16, tied=False))
    engine.receive_weights(IpcUpdateInfo(**json.loads(json.dumps(info))))
    assert n_bytes == 32
    assert engine.model.loaded == WEIGHTS
    assert opened == [arguments(tensor, number) for number, tensor in enumerate(WEIGHTS.values())]

    Gpu.uuid = "another"
    with pytest.raises(ValueError, match="not found for GPU UUID another"):
        engine.receive_weights(IpcUpdateInfo(**info))


def test_anything_but_the_whole_policy_is_refused() -> None:
    data, checksum = message()
    with pytest.raises(ValueError, match="16 numbers, but the policy has 20"):
        ipc_update_info(data, checksum, PolicySize(20, tied=False))
    with pytest.raises(ValueError, match="have the checksum"):
        ipc_update_info(data, checksum + 1, PolicySize(16, tied=False))


def test_a_rank_shares_only_the_version_that_was_asked_for() -> None:
    rank = TrainerRank(Config().model_dump_json(), 0)
    data, checksum = rank.ipc_handles(7)
    assert (len(data), checksum) == (0, EMPTY_CHECKSUM)
