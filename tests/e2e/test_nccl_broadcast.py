"""Weights over NCCL, as far as a machine without GPUs can tell: vLLM gets the arguments that it expects."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.driver.cluster import place_actors
from actors.generator.engine_arguments import FILE_BACKEND, engine_arguments
from actors.weights.checksum import PolicySize, TensorSpec, checksum_of
from actors.weights.cuda_ipc import IPC_BACKEND
from actors.weights.nccl_broadcast import (
    BUFFER_BYTES,
    N_BUFFERS,
    decode_announcement,
    encode_announcement,
    init_info,
    update_info,
)
from service.config import Config, load
from service.errors import UserError
from service.run.prepare import prepare

pytestmark = pytest.mark.slow

WEIGHTS = {
    "model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.bfloat16),
    "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16),
}
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def sent(weights: dict[str, torch.Tensor]) -> tuple[np.ndarray, int]:
    """As it travels through Ray's object store."""
    data = encode_announcement(weights)
    return np.frombuffer(data, np.uint8), checksum_of(data)


def test_an_announcement_names_every_tensor_in_the_order_in_which_it_is_sent() -> None:
    tensors = decode_announcement(*sent(WEIGHTS), PolicySize(44, tied=False))
    assert tensors == [
        TensorSpec("model.embed_tokens.weight", "bfloat16", (10, 4)),
        TensorSpec("model.norm.weight", "bfloat16", (4,)),
    ]
    assert sum(tensor.n_bytes for tensor in tensors) == 88


def test_a_tied_head_counts_once_and_anything_but_the_whole_policy_is_refused() -> None:
    with_head = WEIGHTS | {"lm_head.weight": WEIGHTS["model.embed_tokens.weight"]}
    assert len(decode_announcement(*sent(with_head), PolicySize(44, tied=True))) == 3
    with pytest.raises(ValueError, match="84 numbers, but the policy has 44"):
        decode_announcement(*sent(with_head), PolicySize(44, tied=False))
    data, checksum = sent(WEIGHTS)
    with pytest.raises(ValueError, match="have the checksum"):
        decode_announcement(data, checksum + 1, PolicySize(44, tied=False))


def test_vllm_takes_what_an_engine_is_told() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    info = NCCLWeightTransferInitInfo(**init_info(("10.0.0.1", 29500), workers=2))
    assert (info.master_address, info.master_port, info.rank_offset, info.world_size) == ("10.0.0.1", 29500, 1, 3)
    assert (info.packed, info.packed_buffer_size_bytes, info.packed_num_buffers) == (True, BUFFER_BYTES, N_BUFFERS)
    info = NCCLWeightTransferUpdateInfo(**update_info(decode_announcement(*sent(WEIGHTS), PolicySize(44, tied=False))))
    assert info.names == list(WEIGHTS)
    assert [getattr(torch, name) for name in info.dtype_names] == [tensor.dtype for tensor in WEIGHTS.values()]
    assert info.shapes == [[10, 4], [4]]


def test_vllm_has_what_the_trainers_end_calls() -> None:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    assert list(inspect.signature(trainer_init).parameters) == ["init_info", "rank"]
    wanted = {"iterator", "group", "src", "post_iter_func", "buffer_size_bytes", "num_buffers"}
    assert set(inspect.signature(packed_nccl_broadcast_producer).parameters) == wanted


def test_both_ends_cut_the_stream_at_the_same_places() -> None:
    """vLLM's packing of what is sent, read back by the announced sizes as its workers do."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor

    weights = {f"layers.{i}.weight": torch.randn(3 + i, 5).to(torch.bfloat16) for i in range(7)}
    stream, found = iter(weights.items()), {}
    specs = iter(
        decode_announcement(*sent(weights), PolicySize(sum(tensor.numel() for tensor in weights.values()), tied=False))
    )
    while (chunk := pack_tensors(stream, lambda item: item[1], 100)) is not None:
        of = [next(specs) for _ in chunk.names]
        sizes = [tensor.n_bytes for tensor in of]
        dtypes = [getattr(torch, tensor.dtype) for tensor in of]
        shapes = [list(tensor.shape) for tensor in of]
        found |= dict(unpack_tensor(chunk.packed_tensor, [tensor.name for tensor in of], shapes, dtypes, sizes))
    assert next(specs, None) is None
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("transport", "backend"), [("memory", FILE_BACKEND), ("nccl", "nccl"), ("ipc", IPC_BACKEND)])
def test_the_configured_transport_selects_vllms_backend(tmp_path: Path, transport: str, backend: str) -> None:
    config = load([QUICKSTART], [f"weights.transport={transport}", "model.make.hidden_size=32"]).config
    folder = prepare(config, tmp_path).model_folder
    assert engine_arguments(config, folder)["weight_transfer_config"] == {"backend": backend}


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_without_a_gpu_the_run_is_refused_in_one_line(local_ray: None, tmp_path: Path, transport: str) -> None:
    config: Config = load([QUICKSTART], [f"weights.transport={transport}", "model.make.hidden_size=32"]).config
    prepared = prepare(config, tmp_path / "run")
    with pytest.raises(UserError, match=rf"weights\.transport: {transport} sends .* use memory") as refused:
        place_actors(config, prepared, tmp_path / "journal")
    assert "\n" not in str(refused.value)
