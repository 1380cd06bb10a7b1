"""How a trainer rank is started and joins its process group, and which part of a mini-batch it gets."""

import gzip
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import psutil
import pytest
import ray
import torch
from torch.distributed import DistNetworkError

from actors.driver.placement import rank_options
from actors.observe.actor_logs import log_env
from actors.trainer import actor
from actors.trainer.actor import TrainerRank, choose_interface, process_group_backend
from actors.trainer.group import TrainerGroup
from actors.weights.part import TrainerLost
from service.config import Config, RunConfig, TrainerConfig, WeightsConfig
from service.errors import ProcessLost, UserError
from service.learn.learner import StepReport
from service.learn.model.policy import OutOfMemory
from service.learn.model.policy_model import Checkpointing
from service.run.folder import LOGS, PROFILES
from service.run.liveness.host_memory import REMEDIES
from service.run.liveness.supervisor import Life
from tests.pure.actors.fakes import Method, answering

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NOTHING = np.zeros(0, np.uint8)


@pytest.fixture(autouse=True)
def without_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)


def options(transport: Literal["memory", "ipc"], gpus: int) -> dict[str, Any]:
    config = Config(weights=WeightsConfig(transport=transport), trainer=TrainerConfig(ranks=2))
    return rank_options(config, gpus, SimpleNamespace(), 0)  # type: ignore[arg-type]


def test_memory_of_a_gpu_is_reserved_in_segments_that_grow_unless_cuda_ipc_shares_it() -> None:
    assert options("memory", 1)["runtime_env"]["env_vars"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
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


@pytest.mark.parametrize("ask", [lambda r: r.bucket(1, 0, 8), lambda r: r.ipc_handles(1), lambda r: r.step(NOTHING)])
def test_a_restarted_rank_does_not_answer_as_one_that_has_newer_weights(ask: Callable[[TrainerRank], Any]) -> None:
    with pytest.raises(ProcessLost, match="trainer-0 was restarted and is not set up"):
        ask(TrainerRank(Config().model_dump_json(), 0, None, False))


def test_gloo_and_nccl_use_the_interface_of_the_nodes_address_unless_the_user_chose_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"virbr0": "192.168.122.1", "bond0": "10.0.0.7"}
    addresses = {name: [SimpleNamespace(address=address)] for name, address in there.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    for chosen, found in (({}, "=bond0"), ({"NCCL_SOCKET_IFNAME": "ib0"}, "ib0")):
        monkeypatch.setattr(os, "environ", dict(chosen))
        choose_interface("10.0.0.7", 1)
        assert os.environ == chosen
        choose_interface("10.0.0.7", 2)
        assert os.environ == {"GLOO_SOCKET_IFNAME": "bond0", "NCCL_SOCKET_IFNAME": found}
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "bond0,eth9"})
    with pytest.raises(UserError, match=r"^GLOO_SOCKET_IFNAME: .* no interface eth9, only virbr0, bond0$"):
        choose_interface("10.0.0.7", 1)


def test_the_meeting_point_is_held_from_the_moment_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a node"))
    config = Config(trainer=TrainerConfig(ranks=2)).model_dump_json()
    first, second = (TrainerRank(config, rank) for rank in range(2))
    node, point = first.place()
    assert node == "a node" and first.place()[1] == point and second.place() == ("a node", ("127.0.0.1", 0))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(point)
    second._joined(point).set("joined", "1")
    assert first._store is not None and first._store.get("joined") == b"1"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (DistNetworkError("closed"), TrainerLost),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] closed by peer"), TrainerLost),
        (RuntimeError("the shapes differ: closed"), RuntimeError),
    ],
)
async def test_a_rank_that_cannot_meet_the_others_is_a_lost_trainer_and_a_bug_is_none(
    error: Exception, raised: type[Exception]
) -> None:
    rank = rank_whose_step_fails(0, [], ValueError())
    rank.load = answering(ray.exceptions.RayTaskError("load", "closed", error).as_instanceof_cause())
    with pytest.raises(raised, match="closed") as failed:
        await TrainerGroup(Config(), [rank]).load(Path())
    assert isinstance(failed.value, TrainerLost) == (raised is TrainerLost)


def rank_whose_step_fails(number: int, loaded: list[Any], error: Exception, lacks: list[Any] | None = None) -> Any:
    """A rank that keeps with what checkpointing it was loaded, and fails in its step, or as it loads where it lacks."""

    async def load(*arguments: Any) -> None:
        loaded.append((number, arguments[-1]))
        if lacks:
            raise OutOfMemory(f"rank {number} was out of memory", lacks.pop(0))

    life, place = answering(Life(f"process {number}", is_set_up=True)), answering(("", ("", 0)))
    return SimpleNamespace(life=life, place=place, load=Method(load), step=answering(error))


async def test_after_a_lack_of_memory_all_ranks_load_with_less_and_it_is_said_what_to_change() -> None:
    loaded: list[Any] = []
    says = "rank 1 was out of memory"
    errors = [OutOfMemory(says, Checkpointing(2)), OutOfMemory(says, None), OutOfMemory(says, Checkpointing(4))]
    group = TrainerGroup(Config(), [rank_whose_step_fails(0, loaded, errors[0]) for _ in range(2)])
    for error in errors:
        group._ranks = [rank_whose_step_fails(number, loaded, error) for number in range(2)]
        await group.load(Path())
        with pytest.raises(TrainerLost) as lost:
            await group.step([NOTHING])
        told = f"{says}; {REMEDIES['trainer']}, or use a host with more memory"  # also where the run then ends
        assert str(lost.value) == f"the trainer failed ({told})"
        assert lost.value.is_remedied is (error.lighter is not None)
    await group.load(Path())
    levels = (None, Checkpointing(2), Checkpointing(2), Checkpointing(4))
    assert loaded == [(number, level) for level in levels for number in (0, 1)]


async def test_ranks_whose_trial_lacks_memory_start_again_with_the_next_level_all_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Any] = []
    lacks: list[Checkpointing | None] = [Checkpointing(2), Checkpointing(4)]
    made = (
        rank_whose_step_fails(number, loaded, OutOfMemory("", None), lacks if number else None) for number in (0, 1)
    )
    group = TrainerGroup(Config(), [*made])

    def kill(of: Any, no_restart: bool) -> None:
        group._processes = []  # the processes that come back are others

    monkeypatch.setattr(ray, "kill", kill)
    await group.load(Path())
    levels = [None, Checkpointing(2), Checkpointing(4)]
    assert sorted(loaded, key=lambda of: of[0]) == [(number, level) for number in (0, 1) for level in levels]
    lacks[:] = [None]
    with pytest.raises(TrainerLost, match="rank 1 was out of memory; lower") as lost:
        await group.load(Path())
    assert not lost.value.is_remedied


@pytest.mark.parametrize("fails", [False, True])
def test_compiled_layers_are_tried_as_they_load_before_the_deadline_of_a_step_counts(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    done: list[Any] = []

    def tried(*_: Any) -> None:
        done.append("tried")
        if fails:
            raise OutOfMemory("", None)

    monkeypatch.setattr(actor, "take_trial", tried)
    monkeypatch.setattr(actor, "stop_compiling", lambda: done.append("compiled"))
    monkeypatch.setattr(actor, "set_collective_deadline", done.append)
    monkeypatch.setattr(actor, "freeze_heap", lambda: None)
    monkeypatch.setattr(actor, "Learner", lambda *_: SimpleNamespace())
    for is_compiled in (True, False):
        done.clear()
        policy = SimpleNamespace(compiles=is_compiled, checkpointing=Checkpointing(0))
        monkeypatch.setattr(actor, "Policy", lambda *_, found=policy, **__: found)
        config = Config(trainer=TrainerConfig(ranks=1, compile=is_compiled, collective_deadline=120))
        rank = TrainerRank(config.model_dump_json(), 0, None, False)
        with pytest.raises(OutOfMemory) if fails and is_compiled else nullcontext():
            rank.load(("127.0.0.1", 1), "")
        expected = ["tried", "compiled", 120.0] if is_compiled else [120.0]
        assert done == expected[: 1 if fails and is_compiled else None]


def rank_that_keeps(given: list[Any]) -> Any:
    async def step(batch: Any) -> StepReport:
        given.append(batch)
        return StepReport(True, None, {"trainer/gpu_reserved_bytes": float(batch[0]), "policy/grad_norm": 2.0})

    return SimpleNamespace(step=SimpleNamespace(remote=step))


@pytest.mark.parametrize("n_parts", [4, 2, 1])
async def test_ranks_that_share_micro_batches_get_the_same_part(n_parts: int) -> None:
    parts = [np.full(3, number, np.uint8) for number in range(n_parts)]
    given: list[list[Any]] = [[] for _ in range(4)]
    report = await TrainerGroup(Config(), [rank_that_keeps(each) for each in given]).step(parts)
    assert report.metrics == {"trainer/gpu_reserved_bytes": n_parts - 1, "policy/grad_norm": 2.0}
    assert [each[0] is parts[rank * n_parts // 4] for rank, each in enumerate(given)] == [True] * 4


async def test_a_checkpoint_may_take_any_time_as_long_as_bytes_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.trainer.group.PROGRESS_SECONDS", 0.05)
    progress: list[Any] = [*range(20), None]
    rank = SimpleNamespace(save_progress=answering(progress))
    config = Config(run=RunConfig(stall_deadline=0.5))
    await TrainerGroup(config, [rank]).finish_save()
    assert progress == []
    stuck = TrainerGroup(config, [rank, SimpleNamespace(save_progress=answering(7))])
    progress.extend([None] * 20)
    with pytest.raises(TrainerLost, match="no byte of its checkpoint for 0 s"):
        await stuck.finish_save()


def test_a_rank_writes_a_profile_of_the_steps_that_the_settings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOGS).mkdir()
    monkeypatch.setattr(actor, "decode_mini_batch", lambda batch: batch)
    config = Config(trainer=TrainerConfig(profile_steps=2)).model_dump_json()
    ranks = [TrainerRank(config, rank) for rank in range(2)]
    for name, value in log_env(tmp_path / LOGS).items():  # not before, because an actor redirects its output
        monkeypatch.setenv(name, value)
    for rank in ranks:
        rank._learner = SimpleNamespace(step=lambda batch: torch.ones(3).cumsum(0))  # type: ignore[assignment]
        for _ in range(6):
            rank.step(NOTHING)
    (file,) = (tmp_path / PROFILES).iterdir()
    assert file.name == "steps-4-to-5-trainer-0.json.gz"
    assert gzip.decompress(file.read_bytes()).count(b'"aten::cumsum"') == 2
