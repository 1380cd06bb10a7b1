"""How a trainer rank is started and joins its process group, and which part of a mini-batch it gets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest
import torch

from actors.driver.placement import rank_options
from actors.trainer.actor import TrainerRank, interface_of, process_group_backend
from actors.trainer.group import TrainerGroup
from service.config import Config, TrainerConfig, WeightsConfig
from service.errors import ProcessLost, UserError
from service.run.supervisor import Life

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def options(transport: Literal["memory", "nccl", "ipc"], gpus: int) -> dict[str, Any]:
    config = Config(weights=WeightsConfig(transport=transport), trainer=TrainerConfig(ranks=2))
    return rank_options(config, gpus, SimpleNamespace(), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["memory", "nccl"])
def test_memory_of_a_gpu_is_reserved_in_segments_that_grow(transport: Literal["memory", "nccl"]) -> None:
    assert options(transport, 1)["runtime_env"]["env_vars"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_memory_that_cuda_ipc_shares_lies_in_fixed_segments() -> None:
    assert options("ipc", 1)["runtime_env"]["env_vars"] == {}


@pytest.mark.parametrize(
    ("device", "cpu_offload", "backend"),
    [(CPU, False, "gloo"), (CPU, True, "gloo"), (CUDA, False, "cuda:nccl"), (CUDA, True, "cuda:nccl,cpu:gloo")],
)
def test_gloo_takes_part_only_where_tensors_lie_on_the_cpu(
    device: torch.device, cpu_offload: bool, backend: str
) -> None:
    assert process_group_backend(device, cpu_offload) == backend


def test_a_restarted_rank_is_told_from_the_old_one_also_where_its_process_has_the_same_id() -> None:
    """Ids begin from 1 in every pod; with the same id the driver would wait for the restart until its deadline."""
    old, new = (TrainerRank(Config().model_dump_json(), 0, None, False) for _ in range(2))
    assert old.life() == old.life() == Life(old.life().process, is_set_up=False) != new.life()


@pytest.mark.parametrize("ask", [lambda r: r.bucket(1, 0, 8, False), lambda r: r.ipc_handles(1), lambda r: r.step(b"")])
def test_a_restarted_rank_does_not_answer_as_one_that_has_newer_weights(ask: Callable[[TrainerRank], Any]) -> None:
    with pytest.raises(ProcessLost, match="trainer-0 was restarted and is not set up"):
        ask(TrainerRank(Config().model_dump_json(), 0, None, False))


def test_gloo_binds_the_interface_of_the_address_that_ray_uses() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name == "AF_INET":
                found = {each.address for each in psutil.net_if_addrs()[interface_of(address.address)]}
                assert address.address in found, name


def test_an_address_that_no_interface_has_is_one_line() -> None:
    with pytest.raises(
        UserError, match=r"no network interface of this host has the address 203\.0\.113\.9 .*--node-ip"
    ):
        interface_of("203.0.113.9")


def rank_that_keeps(given: list[bytes]) -> Any:
    async def step(batch: bytes) -> str:
        given.append(batch)
        return "report"

    return SimpleNamespace(step=SimpleNamespace(remote=step))


@pytest.mark.parametrize("parts", [[b"a", b"b", b"c", b"d"], [b"a", b"b"], [b"a"]])
async def test_ranks_that_share_micro_batches_get_the_same_part(parts: list[bytes]) -> None:
    given: list[list[bytes]] = [[] for _ in range(4)]
    assert await TrainerGroup.of(Config(), [rank_that_keeps(each) for each in given]).step(parts) == "report"
    assert given == [[part] for part in parts for _ in range(4 // len(parts))]
