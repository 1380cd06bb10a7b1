"""New weights on their way to generators that fail, start again, or are told too late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import actors.fleet
from actors.fleet import Fleet
from actors.trainer import PublishedWeights
from service.config import Config, WeightsConfig
from service.config.rollout import GeneratorConfig
from service.errors import RunFailed, WeightsGone
from service.types import PolicyVersion
from tests.pure.actors.fakes import FakeGenerator, Method, died

pytestmark = pytest.mark.asyncio


class FakeTrainer:
    """Sends, or shares, the weights of one version."""

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self.newest = PolicyVersion(1, 1)

    async def join_engine(self, engine: str, generator: FakeGenerator) -> None:
        self.said.append(f"{engine} joins")

    async def begin_send(self, engine: str, version: PolicyVersion) -> bool:
        if version == self.newest:
            self.said.append(f"sends {version} to {engine}")
        return version == self.newest

    async def share(self, number: int, version: PolicyVersion) -> PublishedWeights | None:
        return PublishedWeights(f"memory {number}", 9) if version == self.newest else None


class FakeTelemetry:
    def __init__(self) -> None:
        self.failed = 0

    def sync_failed(self) -> None:
        self.failed += 1


class World:
    """A fleet of two, and what was said and done."""

    def __init__(self, transport: str, **weights: Any) -> None:
        self.said: list[str] = []
        self.generators = [FakeGenerator(f"generator-{number}", self.said) for number in range(2)]
        self.trainer, self.telemetry, self.told = FakeTrainer(self.said), FakeTelemetry(), list[str]()
        settings = WeightsConfig.model_validate({"transport": transport, **weights})
        config = Config(generator=GeneratorConfig(engines=2), weights=settings)
        self.fleet = Fleet(config, self.generators, self.trainer, self.telemetry, self.told.append)  # type: ignore[arg-type]

    async def started(self) -> World:
        for generator in self.generators:
            generator.start = answering("node")
        await self.fleet.start()
        return self

    async def publish(self, step: int) -> list[str]:
        """What was said while the engines took the weights of this step."""
        self.said.clear()
        await self.fleet.publish(PolicyVersion(1, step), PublishedWeights(f"weights {step}", step))
        await self.fleet.published()
        return sorted(self.said)


def answering(answer: Any) -> Method:
    async def function(*arguments: Any) -> Any:
        return answer

    return Method(function)


async def until(come: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not come():
            await asyncio.sleep(0)


async def test_the_first_generator_writes_the_file_that_both_load_from() -> None:
    world = await World("memory").started()
    assert await world.publish(1) == [f"generator-{n} takes 1.1 from /generator-0/1, checksum 1" for n in range(2)]
    assert world.generators[0].paths == set()


async def test_a_file_that_went_with_its_holder_is_written_anew_by_who_missed_it() -> None:
    world = await World("memory").started()
    world.generators[0].loading.clear()
    world.generators[1].failing["update"] = WeightsGone("the weights are gone")
    publishing = asyncio.ensure_future(world.publish(1))
    await until(lambda: bool(world.said))
    world.generators[0].loading.set()
    assert await publishing == [
        "generator-0 takes 1.1 from /generator-0/1, checksum 1",
        "generator-1 takes 1.1 from /generator-1/1, checksum 1",
    ]
    assert (world.telemetry.failed, world.told) == (0, [])
    assert world.generators[1].paths == set()


@pytest.mark.parametrize("transport", ["memory", "nccl", "ipc"])
async def test_an_engine_that_fails_meanwhile_keeps_nobody_from_the_weights(transport: str) -> None:
    world = await World(transport).started()
    world.generators[0].failing["update"] = died()
    (took,) = [line for line in await world.publish(1) if "takes" in line]
    assert took.startswith("generator-1 takes 1.1")
    assert world.telemetry.failed == 1
    assert len(world.told) == 1 and "generator-0 did not take the weights of version 1.1" in world.told[0]


async def test_weights_that_no_engine_can_use_are_a_bug_that_is_not_swallowed() -> None:
    world = await World("memory").started()
    world.generators[0].failing["update"] = ValueError("another checksum")
    with pytest.raises(ValueError, match="another checksum"):
        await world.publish(1)


async def test_an_engine_joins_its_trainer_once_and_again_after_the_trainer_is_another() -> None:
    world = await World("nccl").started()
    sent = [f"sends 1.1 to generator-{n}" for n in range(2)]
    took = [f"generator-{n} takes 1.1 from weights 1, checksum 1" for n in range(2)]
    joins = [f"generator-{n} joins" for n in range(2)]
    assert await world.publish(1) == sorted(joins + took + sent)
    assert await world.publish(1) == took + sent
    for line in took:
        name = line.split()[0]
        assert world.said.index(f"sends 1.1 to {name}") < world.said.index(line)
    world.fleet.trainer_started_again()
    assert await world.publish(1) == sorted(joins + took + sent)


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
async def test_an_engine_is_not_told_a_version_that_its_trainer_no_longer_has(transport: str) -> None:
    """The trainer already has the weights of the next step when a generator that was away asks for the last ones."""
    world = await World(transport).started()
    world.trainer.newest = PolicyVersion(1, 2)
    assert not [line for line in await world.publish(1) if "takes" in line]
    assert len([line for line in await world.publish(2) if "takes 1.2" in line]) == 2
    assert world.told == []


async def test_an_engine_loads_what_lies_on_its_own_gpu() -> None:
    world = await World("ipc").started()
    assert await world.publish(1) == [f"generator-{n} takes 1.1 from memory {n}, checksum 9" for n in range(2)]


@pytest.mark.parametrize("transport", ["memory", "nccl", "ipc"])
async def test_a_generator_that_starts_again_gets_the_newest_weights_once_it_is_up_and_not_before(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.fleet.ray, "kill", lambda *_, **__: None)
    world = await World(transport).started()
    await world.publish(1)
    up, ended = asyncio.Event(), asyncio.Event()
    runs = iter([died()])

    async def start() -> str:
        await up.wait()
        return "node"

    async def run() -> None:
        if (error := next(runs, None)) is not None:
            raise error
        await ended.wait()

    for generator in world.generators:
        generator.run = Method(run) if generator is world.generators[0] else answering(None)
        generator.status = answering({})
    world.generators[0].start = Method(start)
    running = asyncio.ensure_future(world.fleet.run())
    await until(lambda: bool(world.told))
    world.trainer.newest = PolicyVersion(1, 2)
    (took,) = [line for line in await world.publish(2) if "takes" in line]
    assert took.startswith("generator-1 takes 1.2")
    world.said.clear()
    up.set()
    await until(lambda: len(world.told) == 2)
    (took,) = [line for line in world.said if "takes" in line]
    assert took.startswith("generator-0 takes 1.2")
    assert ("generator-0 joins" in world.said) == (transport == "nccl")
    ended.set()
    await running
    assert world.telemetry.failed == 0


async def test_an_evaluation_asks_only_generators_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.fleet.ray, "kill", lambda *_, **__: None)
    world = await World("memory").started()
    asked: list[Any] = []

    async def evaluated(engines: Any, *arguments: Any) -> str:
        asked.extend(engines)
        return "evaluation"

    monkeypatch.setattr(actors.fleet, "evaluate_on", evaluated)
    never = asyncio.Event()

    async def raises() -> None:
        raise died()

    async def waits() -> None:
        await never.wait()

    for generator in world.generators:
        generator.run, generator.start = Method(waits), Method(waits)
    world.generators[0].run = Method(raises)
    running = asyncio.ensure_future(world.fleet.run())
    await until(lambda: bool(world.told))
    await world.fleet.evaluate("dev", Path("dev.jsonl"), 1)
    assert asked == [world.generators[1]]
    running.cancel()


async def test_weights_that_nobody_takes_in_time_end_the_run() -> None:
    world = await World("memory", sync_deadline=0.05).started()
    world.generators[0].gate.clear()
    with pytest.raises(RunFailed, match="did not take new weights within 0 s"):
        await world.publish(1)
