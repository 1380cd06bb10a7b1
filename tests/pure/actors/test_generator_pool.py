"""New weights on their way to generators that fail, start again, or are told too late."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError

import actors.calls
from actors.deaths import is_death
from actors.generator.generator_pool import GeneratorPool
from actors.weights.part import TRAINER, PublishedWeights, Source, TrainerLost, WeightPart
from service.backoff import Backoff
from service.config import RunConfig, WeightsConfig
from service.config.rollout import GeneratorConfig
from service.errors import RunFailed, WeightsGone
from service.run.liveness import supervisor as liveness
from service.run.liveness.supervisor import Life, Supervisor
from service.types import PolicyVersion
from tests.pure.actors.fakes import FakeGenerator, FakeRank0, Method, answering, died, published, until


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The generators whose processes were ended."""
    gone: list[Any] = []
    monkeypatch.setattr(liveness, "CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(actors.generator.generator_pool.ray, "kill", lambda generator, **_: gone.append(generator))
    return gone


class FakeTrainer(FakeRank0):
    """Sends, or shares, the weights of one version."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said
        self.lost = False

    async def ipc_handles(self, number: int, version: PolicyVersion) -> tuple[bytes, int] | None:
        if self.lost:
            raise TrainerLost("the trainer failed")
        return (f"memory {number}".encode(), 9) if version == self.newest else None


async def cause(name: str, last: Life) -> str:
    return "it died"


class World:
    """A pool, of two if nothing else is said, and what was said and done."""

    def __init__(
        self, transport: str, max_restarts: int = 3, tensor_parallel_size: int = 1, engines: int = 2, **weights: Any
    ) -> None:
        self.said: list[str] = []
        self.generators = [FakeGenerator(f"generator-{number}", self.said) for number in range(engines)]
        self.trainer, self.failed, self.told = FakeTrainer(self.said), list[bool](), list[str]()
        settings = WeightsConfig.model_validate({"transport": transport, **weights})
        run = RunConfig(max_restarts=max_restarts)
        generator = GeneratorConfig(engines=engines, tensor_parallel_size=tensor_parallel_size)
        self.supervisor = Supervisor(self.told.append, cause, is_death)
        telemetry = SimpleNamespace(metrics=SimpleNamespace(count=self.count))
        actors = self.generators, self.trainer, telemetry, self.told.append, self.supervisor
        self.left = list[str]()
        buffer = SimpleNamespace(leave=Method(self.leave))
        self.pool = GeneratorPool(generator, run, settings, *actors, buffer)  # type: ignore[arg-type]

    def count(self, name: str, by: float = 1.0) -> None:
        if name == "baton_weight_sync_failures_total":
            self.failed.append(True)

    async def leave(self, name: str, incarnation: None, reason: str) -> None:
        self.left.append(name)

    async def started(self) -> World:
        for generator in self.generators:
            generator.start = answering("node")
        await self.pool.start()
        return self

    async def publish(self, step: int) -> list[str]:
        """What was said while the engines took the weights of this step."""
        self.said.clear()
        await self.pool.weights.publish(published(step))
        await self.pool.weights.published()
        return sorted(self.said)


async def test_an_image_that_went_with_its_holder_is_written_anew_by_who_missed_it() -> None:
    world = await World("memory").started()
    world.generators[0].loading.clear()
    world.generators[1].failing["update"] = WeightsGone("the weights are gone")
    publishing = asyncio.ensure_future(world.publish(1))
    await until(lambda: bool(world.said))
    world.generators[0].loading.set()
    assert await publishing == [
        "generator-0 takes 1:1 from /generator-0/1, checksum 0",
        "generator-1 takes 1:1 from /generator-1/1, checksum 0",
    ]
    assert (len(world.failed), world.told) == (0, [])


@pytest.mark.parametrize("transport", ["memory", "ipc"])
async def test_an_engine_that_fails_meanwhile_keeps_nobody_from_the_weights(transport: str) -> None:
    world = await World(transport).started()
    world.generators[0].failing["update"] = died()
    (took,) = [line for line in await world.publish(1) if "takes" in line]
    assert took.startswith("generator-1 takes 1:1")
    assert len(world.failed) == 1
    assert len(world.told) == 1 and "generator-0 did not take the weights of version 1:1" in world.told[0]


async def test_weights_that_no_engine_can_use_are_a_bug_that_is_not_swallowed() -> None:
    world = await World("memory").started()
    world.generators[0].failing["update"] = ValueError("another checksum")
    with pytest.raises(ValueError, match="another checksum"):
        await world.publish(1)


TAKES = [f"generator-{n} takes 1:1 from memory {n}, checksum 9" for n in range(2)]


async def test_a_trainer_that_is_lost_as_it_should_share_wakes_the_driver_and_publishes_again_when_it_is_back() -> None:
    world = await World("ipc").started()
    world.trainer.lost = True
    training = asyncio.ensure_future(world.supervisor.unless_lost([TRAINER], asyncio.Event().wait()))
    assert await world.publish(1) == []
    with pytest.raises(TrainerLost):
        await training
    assert (world.told, len(world.failed)) == ([], 0), "the engines are not at fault"
    world.trainer.lost = False
    assert await world.publish(1) == TAKES


async def test_an_engine_is_not_told_a_version_that_its_trainer_no_longer_has() -> None:
    """The trainer already has the weights of the next step when a generator that was away asks for the last ones."""
    world = await World("ipc").started()
    world.trainer.newest = PolicyVersion(1, 2)
    assert not [line for line in await world.publish(1) if "takes" in line]
    assert len([line for line in await world.publish(2) if "takes 1:2" in line]) == 2
    assert world.told == []


@pytest.mark.parametrize("transport", ["memory", "ipc"])
async def test_a_generator_that_starts_again_is_down_and_gets_the_newest_weights_once_it_is_up(
    transport: str,
) -> None:
    world = await World(transport).started()
    await world.publish(1)
    up = asyncio.Event()

    async def start() -> str:
        await up.wait()
        return "node"

    ended = ready_to_fail(world, Method(start))
    running = asyncio.ensure_future(world.pool.run())
    await until(lambda: bool(world.told))
    assert world.pool.up() == {"generator-1": world.generators[1]}
    world.trainer.newest = PolicyVersion(1, 2)
    (took,) = [line for line in await world.publish(2) if "takes" in line]
    assert took.startswith("generator-1 takes 1:2")
    world.said.clear()
    up.set()
    await until(lambda: len(world.told) == 2)
    (took,) = [line for line in world.said if "takes" in line]
    assert took.startswith("generator-0 takes 1:2")
    ended.set_result(None)
    await running
    assert len(world.failed) == 0


def ready_to_fail(world: World, starts: Method) -> asyncio.Future[None]:
    """The first generator dies once and starts as said, and both run until the returned future is done."""
    deaths, ended = iter([died()]), asyncio.get_running_loop().create_future()

    async def run() -> None:
        if (error := next(deaths, None)) is not None:
            raise error
        await ended

    for generator in world.generators:
        generator.run = answering(ended)
    world.generators[0].run, world.generators[0].start = Method(run), starts
    for generator in world.generators:
        generator.status = generator.stop = answering({})
    return ended


@pytest.mark.parametrize(("failures", "most"), [(2, 3), (3, 3), (2, 2)])
async def test_an_engine_that_does_not_start_again_is_one_more_failure_of_those_that_a_run_survives(
    failures: int, most: int, killed: list[Any]
) -> None:
    world = await World("memory", max_restarts=most).started()
    starts = iter([RunFailed("vLLM did not start")] * failures)

    async def start() -> str:
        if (error := next(starts, None)) is not None:
            raise error
        return "node"

    ended = ready_to_fail(world, Method(start))
    await world.publish(1)
    running = asyncio.ensure_future(world.pool.run())
    if failures == most:  # with the death before them
        with pytest.raises(RunFailed, match=rf"generator-0 failed {most + 1} times.*vLLM did not start"):
            await running
        return
    world.said.clear()
    await until(lambda: "generator-0 is back" in world.told)
    assert killed == [world.generators[0]] * (failures + 1), "each try is a process of its own"
    assert world.supervisor.restarts["generator-0"] == failures, "beside the death"
    assert [line for line in world.said if "takes" in line] == ["generator-0 takes 1:1 from /generator-0/1, checksum 0"]
    ended.set_result(None)
    await running


async def test_what_the_only_generator_played_waits_for_any_before_it_is_back() -> None:
    world = await World("memory", engines=1).started()
    ready_to_fail(world, answering(asyncio.Future()))
    running = asyncio.ensure_future(world.pool.run())
    await until(lambda: world.left == ["generator-0"])
    running.cancel()
    await asyncio.wait([running])


async def test_a_run_that_ends_waits_for_no_generator_that_cannot_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.calls, "RESTARTING", Backoff(0.0))
    world = await World("memory").started()
    ended = ready_to_fail(world, answering(died()))
    running = asyncio.ensure_future(world.pool.run())
    await until(lambda: bool(world.told))
    ended.set_result(None)
    await world.pool.stop(resumable=False)
    async with asyncio.timeout(60):
        await running


async def test_weights_that_are_lost_on_their_way_are_waited_for_until_the_next() -> None:
    world = await World("memory").started()
    for generator in world.generators:
        generator.failing["hold"] = ObjectLostError("0" * 56, None, "")
    assert await world.publish(1) == []
    assert len(world.failed) == 2
    assert ["lost" in line for line in world.told] == [True, True]
    assert [line.rpartition(",")[0] for line in await world.publish(2)] == [
        f"generator-{n} takes 1:2 from /generator-0/2" for n in range(2)
    ]


async def test_an_engine_that_does_not_take_weights_in_time_costs_that_engine_and_not_the_run() -> None:
    world = await World("memory", sync_deadline=0.05).started()
    world.generators[0].loading.clear()
    taken = await world.publish(1)
    assert [line.partition(" ")[0] for line in taken] == ["generator-1"]
    assert len(world.failed) == 1 and "generator-0 did not take the weights of version 1:1" in world.told[0]
    large = PublishedWeights(PolicyVersion(1, 1), (Source(WeightPart(((0, 10**11),)), "/rank-0"),))
    assert large.seconds(300.0) == 1300.0, "more bytes may take longer"


async def test_code_that_blocks_a_generator_is_named_in_the_terminal_as_often_as_the_generator_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actors.generator.generator_pool, "RESTARTING", Backoff(0.0))
    world = await World("memory", engines=1).started()
    generator = world.generators[0]
    generator.run = answering(asyncio.Future())
    running = asyncio.ensure_future(world.pool.run())
    for place in ("blocked by a.py:1", "blocked by b.py:2"):
        generator.blocking.put_nowait(died())  # a connection was cut, and the process lives
        generator.blocking.put_nowait(place)
        await until(lambda place=place: f"generator-0: {place}" in world.told)
    assert generator.places_known[:4] == [0, 0, 1, 1] and not caplog.records
    generator.blocking.put_nowait(ZeroDivisionError("a bug of the watch"))
    await until(lambda: "ZeroDivisionError: a bug of the watch" in caplog.text)
    assert not running.done(), "the run does not depend on it"
    running.cancel()


async def test_engines_beside_the_ranks_pull_from_their_memory_and_nothing_is_sent() -> None:
    world = await World("memory").started()
    world.trainer.nodes = ("node",)
    await world.pool.weights.publish(published(1))
    await world.pool.weights.published()
    assert sorted(world.said) == [f"generator-{n} takes 1:1 from /rank-0, checksum 0" for n in range(2)]
    assert [generator.paths for generator in world.generators] == [[], []]


async def test_where_the_ranks_memory_is_gone_the_trainer_is_lost_and_no_engine_is_blamed() -> None:
    world = await World("memory").started()
    world.trainer.nodes = ("node",)
    world.generators[1].failing["update"] = WeightsGone("version 9, not 8")
    training = asyncio.ensure_future(world.supervisor.unless_lost([TRAINER], asyncio.Event().wait()))
    await world.pool.weights.publish(published(1))
    with pytest.raises(TrainerLost, match=r"generator-1 finds no weights of version 1:1 .*version 9, not 8"):
        await asyncio.wait_for(training, 60)
    assert len(world.failed) == 0
