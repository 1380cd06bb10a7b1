"""Weights broadcast to real engines, on CPU by gloo; on GPUs the same code broadcasts by NCCL."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import ray
import torch
from transformers import PreTrainedModel

from actors.driver.cluster import place_actors
from actors.driver.prepare import prepare
from actors.engine.vllm_arguments import PULL_BACKEND, EngineSettings, engine_arguments
from actors.engine.vllm_engine import VllmEngine
from actors.trainer.actor import TrainerRank
from actors.weights import broadcasts
from actors.weights.broadcasts import Broadcasts
from actors.weights.cuda_ipc import IPC_BACKEND
from actors.weights.nccl_broadcast import BROADCAST_BACKEND
from actors.weights.policy_tensors import PolicySize, checksum_of, decode_announcement, encode_announcement
from actors.weights.weight_group import Meeting, WeightGroup
from actors.weights.weight_source import PublishedWeights
from service.config import Config, WeightsConfig, load
from service.errors import UserError
from service.rollout.engine import Sampling
from service.types import PolicyVersion
from tests.e2e.test_engine import ATOL, CONFIG, dense, difference, prompt, started, weights_of

pytestmark = pytest.mark.slow

WEIGHTS = {
    "model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.bfloat16),
    "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16),
}
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def sent(weights: dict[str, torch.Tensor]) -> tuple[bytes, int]:
    data = encode_announcement(weights)
    return data, checksum_of(data)


def test_an_announcement_names_every_tensor_in_the_order_in_which_it_is_sent() -> None:
    info, n_bytes = decode_announcement(*sent(WEIGHTS), PolicySize(44, tied=False))
    assert info["tensors"] == [
        ["model.embed_tokens.weight", "bfloat16", [10, 4]],
        ["model.norm.weight", "bfloat16", [4]],
    ]
    assert n_bytes == 88


def test_a_tied_head_counts_once_and_anything_but_the_whole_policy_is_refused() -> None:
    with_head = WEIGHTS | {"lm_head.weight": WEIGHTS["model.embed_tokens.weight"]}
    assert len(decode_announcement(*sent(with_head), PolicySize(44, tied=True))[0]["tensors"]) == 3
    with pytest.raises(ValueError, match="84 numbers, but the policy has 44"):
        decode_announcement(*sent(with_head), PolicySize(44, tied=False))
    data, checksum = sent(WEIGHTS)
    with pytest.raises(ValueError, match="have the checksum"):
        decode_announcement(data, checksum + 1, PolicySize(44, tied=False))


class Engine(VllmEngine):
    """With the face of a generator."""

    async def join_trainer(self, meeting: Meeting, first_rank: int) -> None:
        await self.join(meeting, first_rank)

    async def receive(self, version: int, data: Any, checksum: int) -> None:
        await self.update_weights(PolicyVersion.unpack(version), data, checksum)

    async def core(self) -> int:
        """The id of the process of the engine core."""
        (core,) = (child for child in psutil.Process().children() if "EngineCore" in " ".join(child.cmdline()))
        return core.pid


class Handle(NamedTuple):
    """An engine as the driver calls it."""

    actor: Any
    join_trainer: Any
    update_weights: Any


class Trainer:
    """The trainer's first rank in this process, whose weights are given."""

    def __init__(self, config: Config) -> None:
        self.rank = TrainerRank(config.model_dump_json(), 0)
        self.meetings: list[Meeting] = []

    def gathers(self, version: PolicyVersion, model: PreTrainedModel) -> PublishedWeights:
        self.rank._learner = SimpleNamespace(weights=lambda: weights_of(model))  # type: ignore[assignment]
        announced: Any = self.rank.weights(version.pack())
        return PublishedWeights(version, *announced)

    async def begin_send(self, version: PolicyVersion, meeting: Meeting) -> bool:
        self.meetings.append(meeting)
        return self.rank.begin_send(version.pack(), meeting)


CONFIG_OF_ENGINES = CONFIG.model_copy(update={"weights": WeightsConfig(transport="nccl")})
LONG = Sampling(max_tokens=200)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_an_engine_that_dies_in_a_broadcast_costs_the_others_one_more_and_is_in_the_next_group_when_it_is_back(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcasts, "Meeting", partial(Meeting, bucket_bytes=1 << 16))
    models = [dense(seed) for seed in range(4)]
    trainer = Trainer(CONFIG_OF_ENGINES)

    def start(name: str) -> Handle:
        actor = started(tmp_path / name, models[0], CONFIG_OF_ENGINES, Engine)
        return Handle(actor, actor.join_trainer, actor.receive)

    engines = {name: start(name) for name in ("generator-0", "generator-1")}
    deadline, workers = CONFIG_OF_ENGINES.trainer.collective_deadline, CONFIG_OF_ENGINES.generator.tensor_parallel_size
    driver = Broadcasts(CONFIG_OF_ENGINES.weights, deadline, workers, engines, trainer)  # type: ignore[arg-type]

    async def publish(step: int, *names: str) -> dict[str, BaseException]:
        version = PolicyVersion(1, step)
        return await driver.send(names or list(engines), trainer.gathers(version, models[step]))

    async def serves(name: str, step: int) -> None:
        generation = await engines[name].actor.generate.remote(prompt(0), Sampling(max_tokens=20), f"{name} {step}")
        assert difference(models[step], prompt(0), generation, 1.0) < ATOL
        assert set(generation.versions.tolist()) == {PolicyVersion(1, step).pack()}

    assert await publish(1) == {}
    await asyncio.gather(*(serves(name, 1) for name in engines))

    # the second bucket of the next broadcast is the last that this engine core receives
    core, sent = psutil.Process(await engines["generator-1"].actor.core.remote()), list[int]()
    broadcast = WeightGroup.broadcast

    def kill_at_the_third(group: WeightGroup, tensor: torch.Tensor) -> Any:
        sent.append(tensor.nbytes)
        if len(sent) == 3:
            core.kill()
            core.wait(60)
        return broadcast(group, tensor)

    monkeypatch.setattr(WeightGroup, "broadcast", kill_at_the_third)
    generate = engines["generator-0"].actor.generate
    under_way = [generate.remote(prompt(number), LONG, f"under way {number}") for number in range(16)]
    lost = await publish(2)
    assert list(lost) == ["generator-1"] and "the engine core died" in str(lost["generator-1"])
    assert len(sent) > 10 and max(sent) == 1 << 16, "the weights are many buckets"
    await serves("generator-0", 2)
    versions = {version for turn in under_way for version in (await turn).versions.tolist()}
    assert versions <= {PolicyVersion(1, step).pack() for step in (1, 2)}, "no request was lost"

    ray.kill(engines["generator-1"].actor)
    engines["generator-1"] = start("generator-1")
    driver.forget("generator-1")
    assert await publish(2, "generator-1") == {}
    await serves("generator-1", 2)
    assert await publish(3) == {}
    await asyncio.gather(*(serves(name, 3) for name in engines))
    assert [meeting.size for meeting in trainer.meetings] == [3, 3, 2, 2, 3]
    for engine in engines.values():
        await engine.actor.stop.remote()


@pytest.mark.parametrize(
    ("transport", "backend"), [("memory", PULL_BACKEND), ("nccl", BROADCAST_BACKEND), ("ipc", IPC_BACKEND)]
)
def test_the_configured_transport_selects_vllms_backend(tmp_path: Path, transport: str, backend: str) -> None:
    config = load([QUICKSTART], [f"weights.transport={transport}", "model.make.hidden_size=32"]).config
    folder = prepare(config, tmp_path).model_folder
    assert engine_arguments(EngineSettings.of(config), folder)["weight_transfer_config"] == {"backend": backend}


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_without_a_gpu_the_run_is_refused_in_one_line(local_ray: None, tmp_path: Path, transport: str) -> None:
    config: Config = load([QUICKSTART], [f"weights.transport={transport}", "model.make.hidden_size=32"]).config
    prepared = prepare(config, tmp_path / "run")
    with pytest.raises(UserError, match=rf"weights\.transport: {transport} sends .* use memory") as refused:
        place_actors(config, prepared, tmp_path / "journal")
    assert "\n" not in str(refused.value)
