"""How a trainer rank is started and joins its process group, and which part of a mini-batch it gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
import pytest
import torch

from actors.driver.placement import rank_options
from actors.trainer import actor
from actors.trainer.actor import TrainerRank, interface_of, process_group_backend
from actors.trainer.group import TrainerGroup
from actors.weights.weight_source import TrainerLost
from service.config import Config, TrainerConfig, WeightsConfig
from service.errors import ProcessLost, UserError
from service.learn.learner import StepReport
from service.learn.model.policy_model import Checkpointing
from service.learn.out_of_memory import OutOfMemory
from service.run.liveness import Life
from service.run.memory import REMEDIES

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def options(transport: Literal["memory", "ipc"], gpus: int) -> dict[str, Any]:
    config = Config(weights=WeightsConfig(transport=transport), trainer=TrainerConfig(ranks=2))
    return rank_options(config, gpus, SimpleNamespace(), 0)  # type: ignore[arg-type]


def test_memory_of_a_gpu_is_reserved_in_segments_that_grow() -> None:
    assert options("memory", 1)["runtime_env"]["env_vars"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


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


@pytest.mark.parametrize("ask", [lambda r: r.bucket(1, 0, 8), lambda r: r.ipc_handles(1), lambda r: r.step(b"")])
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


def rank_whose_step_fails(number: int, loaded: list[Any], error: Exception) -> Any:
    """A rank that keeps with what checkpointing it was loaded, and fails in its step."""

    async def life() -> Life:
        return Life(f"process {number}", is_set_up=True)

    async def meeting_point() -> tuple[str, int]:
        return "", 0

    async def node() -> str:
        return ""

    async def load(*arguments: Any) -> None:
        loaded.append(arguments[-1])

    async def step(batch: bytes) -> None:
        raise error

    methods = {"life": life, "meeting_point": meeting_point, "node": node, "load": load, "step": step}
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


async def test_after_a_lack_of_memory_all_ranks_load_with_less_and_it_is_said_what_to_change() -> None:
    loaded: list[Any] = []
    says = "rank 1 was out of memory"
    errors = [OutOfMemory(says, Checkpointing(2)), OutOfMemory(says, None), OutOfMemory(says, Checkpointing(4))]
    group = TrainerGroup.of(Config(), [rank_whose_step_fails(0, loaded, errors[0]) for _ in range(2)])
    for error in errors:
        group._ranks = [rank_whose_step_fails(number, loaded, error) for number in range(2)]
        await group.load(Path())
        with pytest.raises(TrainerLost) as lost:
            await group.step([b""])
        told = f"{says}; {REMEDIES['trainer']}, or use a host with more memory"  # also where the run then ends
        assert str(lost.value) == f"the trainer failed ({told})"
        assert lost.value.is_remedied is (error.lighter is not None)
    await group.load(Path())
    assert loaded == [each for each in (None, Checkpointing(2), Checkpointing(2), Checkpointing(4)) for _ in range(2)]


@pytest.mark.parametrize(("ranks", "kept"), [(1, 2), (4, 3)])
def test_a_rank_keeps_what_all_ranks_have_room_for(monkeypatch: pytest.MonkeyPatch, ranks: int, kept: int) -> None:
    class Loading(Exception):
        """The policy begins to load."""

    def load(*_: Any, checkpointing: Checkpointing, **__: Any) -> None:
        raise Loading(checkpointing)

    monkeypatch.setattr(actor, "fit_on", lambda *_: SimpleNamespace(checkpointing=Checkpointing(2)))
    monkeypatch.setattr(actor, "Policy", load)
    monkeypatch.setattr(actor.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(actor.ray, "nodes", list)
    monkeypatch.setattr(Checkpointing, "of_all_ranks", lambda own: Checkpointing(own.layers + 1))
    rank = TrainerRank(Config(trainer=TrainerConfig(ranks=ranks)).model_dump_json(), 0, None, False)
    with pytest.raises(Loading) as loading:
        rank.load(("127.0.0.1", 1), "")
    assert loading.value.args == (Checkpointing(kept),)


def test_the_first_step_of_compiled_layers_may_wait_longer_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[float] = []
    monkeypatch.setattr(actor, "set_collective_deadline", within.append)
    config = Config(trainer=TrainerConfig(start_deadline=600, collective_deadline=120))
    rank = TrainerRank(config.model_dump_json(), 0, None, False)
    rank._wait_for_compilers()
    rank._learner, rank._supervised = SimpleNamespace(), SimpleNamespace(loss=lambda _: 0.5)  # type: ignore[assignment]
    assert rank.supervised([], lr=None) == 0.5 and within == [600.0], "a measurement compiles no backward pass"
    for _ in range(2):
        with rank._stepping():
            pass
    assert within == [600.0, 120.0]


def rank_that_keeps(given: list[bytes]) -> Any:
    async def step(batch: bytes) -> StepReport:
        given.append(batch)
        return StepReport(True, None, {"trainer/gpu_reserved_bytes": float(batch[0]), "policy/grad_norm": 2.0})

    return SimpleNamespace(step=SimpleNamespace(remote=step))


@pytest.mark.parametrize("parts", [[b"a", b"b", b"c", b"d"], [b"a", b"b"], [b"a"]])
async def test_ranks_that_share_micro_batches_get_the_same_part(parts: list[bytes]) -> None:
    given: list[list[bytes]] = [[] for _ in range(4)]
    report = await TrainerGroup.of(Config(), [rank_that_keeps(each) for each in given]).step(parts)
    assert report.metrics == {"trainer/gpu_reserved_bytes": max(parts)[0], "policy/grad_norm": 2.0}
    assert given == [[part] for part in parts for _ in range(4 // len(parts))]
