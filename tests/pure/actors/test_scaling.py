"""Generators that join a run and leave it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import actors.calls
from actors.deaths import cause_of_death, is_death
from actors.generator import scaling
from actors.generator.generator_pool import GeneratorPool
from actors.generator.scaling import MARGIN_SECONDS, Placed, Scaling
from service.backoff import Backoff
from service.config import Config, WeightsConfig
from service.config.rollout import GeneratorConfig
from service.errors import RunFailed
from service.run.liveness import supervisor as liveness
from service.run.liveness.supervisor import Supervisor
from tests.pure.actors.fakes import FakeGenerator, FakeRank0, Method, answering, died, published

GROUPS, GRACE = 12, 20.0


class Here(FakeGenerator):
    """Starts on a node, generates until it leaves, and shares the groups."""

    def __init__(self, name: str, said: list[str], node: str = "a") -> None:
        super().__init__(name, said)
        self.node, self.ended = node, asyncio.Event()
        self.stop = answering()
        self.most: int | None = None

    async def _start(self) -> str:
        self._fail("start")
        return self.node

    async def _run(self) -> None:
        await self.ended.wait()
        self._fail("run")

    async def _leave(self, grace: float) -> None:
        self.said.append(f"{self.name} leaves within {grace:.0f} s")
        self.ended.set()
        self._fail("leave")

    async def _share(self, groups: int) -> None:
        self.most = groups


class Told:
    """Telemetry and buffer: what they were told."""

    def __init__(self) -> None:
        self.expected: list[int] = []
        self.gone: list[str] = []
        self.leave, self.metrics = Method(self._leave), SimpleNamespace(count=lambda name, by: None)

    def generators(self, expected: int) -> None:
        self.expected.append(expected)

    def left(self, generator: str) -> None:
        self.gone.append(f"{generator} left")

    async def _leave(self, generator: str, incarnation: int | None, reason: str) -> None:
        self.gone.append(f"{generator} {incarnation} {reason}")


class World:
    """A pool that begins with one generator, on node `a`, and may have `most`, each on the node of its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 3) -> None:
        self.said, self.told, self.lines = list[str](), Told(), list[str]()
        self.killed, self.rooms = list[str](), list[str]()
        self.ends = defaultdict[str, asyncio.Event](asyncio.Event)
        """Of each generator: its process is ended."""
        monkeypatch.setattr(actors.generator.generator_pool.ray, "kill", self.kill)
        monkeypatch.setattr(actors.generator.generator_pool, "remove_placement_group", self.rooms.append)
        monkeypatch.setattr(scaling, "PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(liveness, "CAUSE_SECONDS", 0.0)
        engines = {"min": 1, "max": most}
        told = {"engines": engines, "concurrent_groups": GROUPS, "leave_grace": GRACE}
        settings, weights = GeneratorConfig.model_validate(told), WeightsConfig()
        self.config, self.has_room = Config(generator=settings, weights=weights), asyncio.Event()
        self.has_room.set()
        self.there = {0: Here("generator-0", self.said)}
        self.failing: BaseException | None = None
        self.pool = GeneratorPool(
            settings,
            self.config.run,
            weights,
            [self.there[0]],
            FakeRank0(),  # type: ignore[arg-type]
            self.told,
            self.lines.append,
            Supervisor(self.lines.append, cause_of_death, is_death),
            self.told,  # type: ignore[arg-type]
        )
        self.scaling = Scaling(settings, self.config.run, "memory", self.pool, self.place, self.lines.append)

    def kill(self, actor: Here, no_restart: bool = True) -> None:
        if no_restart:
            self.killed.append(actor.name)
            self.ends[actor.name].set()

    async def place(self, number: int) -> Placed:
        await self.has_room.wait()
        made = self.there[number] = Here(f"generator-{number}", self.said, node=str(number))
        if self.failing is not None:
            made.failing["start"] = self.failing
        return Placed(made, f"room {number}")  # type: ignore[arg-type]

    async def running(self) -> asyncio.Task[None]:
        await self.pool.start()
        await self.pool.weights.publish(published(1))
        await self.pool.weights.published()
        return asyncio.ensure_future(self.pool.run())

    async def looked(self, come: Callable[[], bool], look: bool = True, draining: dict[str, int] | None = None) -> None:
        """Look again and again until that has come, or wait for it without a look."""
        async with asyncio.timeout(60):
            while not come():
                if look:
                    self.scaling.look(draining or {})
                await asyncio.sleep(0)

    async def settled(self, *names: str, draining: dict[str, int] | None = None) -> None:
        """Look again and again, until these generators are there and no other."""
        joined = {name for name in names if name != "generator-0"}

        def come() -> bool:
            leaves, left = (sum(told in line for line in self.lines) for told in (" leaves: its node is", " has left"))
            there = joined <= {line.split(" has joined, ")[0] for line in self.lines}
            return list(self.pool.nodes()) == list(names) and there and leaves == left

        await self.looked(come, draining=draining)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_one_that_joins_takes_the_newest_weights_and_one_that_leaves_is_forgotten(world: World) -> None:
    running = await world.running()
    await world.settled("generator-0", "generator-1", "generator-2")
    await asyncio.sleep(0)
    assert [line for line in world.said if "generator-2 takes 1:1" in line]
    assert [made.most for made in world.there.values()] == [GROUPS // 3] * 3
    assert "generator-2 starts: up to 3 generators may run" in world.lines
    world.has_room.clear()
    for _ in range(3):  # several looks let a generator leave once
        world.scaling.look({"1": 0, "2": 0})
    await world.settled("generator-0")
    await world.looked(lambda: len(world.told.gone) >= 4, look=False)
    assert f"generator-2 leaves within {GRACE:.0f} s" in world.said
    assert world.lines.count("generator-2 leaves: its node is drained") == 1
    assert sorted(world.killed) == ["generator-1", "generator-2"] and sorted(world.rooms) == ["room 1", "room 2"]
    assert {"generator-1 None gone", "generator-1 left"} <= set(world.told.gone)
    assert (world.there[0].most, world.told.expected[-1]) == (GROUPS, 1)
    world.said.clear()
    await world.pool.weights.publish(published(2))
    await world.pool.weights.published()
    assert [line.split()[0] for line in world.said] == ["generator-0"]
    world.there[0].ended.set()
    await running


async def test_one_that_leaves_holds_up_no_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine may have stopped in the middle of an update, which then never ends."""
    world = World(monkeypatch, most=2)
    running = await world.running()
    await world.settled("generator-0", "generator-1")
    leaving, updating = world.there[1], asyncio.Event()

    async def update(*arguments: Any) -> None:
        updating.set()
        await world.ends["generator-1"].wait()
        raise died()

    leaving.update_weights = Method(update)
    await world.pool.weights.publish(published(2))
    world.has_room.clear()
    async with asyncio.timeout(30):
        await updating.wait()
        world.scaling.look({"1": 0})
        await world.pool.weights.published()
        while "generator-1 has left" not in world.lines:
            await asyncio.sleep(0)
    assert [line for line in world.said if line.startswith("generator-0 takes 1:2")]
    assert not [line for line in world.lines if "did not take" in line]
    world.there[0].ended.set()
    await running


@pytest.mark.parametrize(("jump", "within"), [(0.0, (2.0, 3.0)), (-3600.0, (GRACE,)), (3600.0, (0.0,))])
async def test_what_is_on_a_drained_node_leaves_in_time_and_another_one_joins_though_none_was_left(
    monkeypatch: pytest.MonkeyPatch, jump: float, within: tuple[float, ...]
) -> None:
    """Where the clock jumps, it goes on for no longer than its grace."""
    now, world = time.time(), World(monkeypatch, most=1)
    running, soon = await world.running(), {"a": int((now + MARGIN_SECONDS + 3) * 1000)}
    monkeypatch.setattr(scaling, "time", SimpleNamespace(time=lambda: now + jump, monotonic=time.monotonic))
    world.scaling.look(soon)
    assert world.pool.nodes() == {}
    await world.settled("generator-1", draining=soon)
    assert float(next(line for line in world.said if "leaves within" in line).split()[-2]) in within
    assert not running.done()
    world.there[1].ended.set()
    await running


async def test_one_that_starts_again_on_a_node_that_is_drained_leaves_and_another_one_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, most=1)
    running, first = await world.running(), world.there[0]

    async def starts() -> str:
        await world.ends["generator-0"].wait()
        raise died()

    async def lost(grace: float) -> None:
        raise died()

    first.start, first.leave, first.failing["run"] = Method(starts), Method(lost), died()
    monkeypatch.setattr(actors.calls, "RESTARTING", Backoff(0.0))
    first.ended.set()
    await world.looked(lambda: any(line.endswith("it starts again") for line in world.lines), look=False)
    await world.settled("generator-1", draining={"a": 0})
    assert not running.done() and "generator-0 None gone" in world.told.gone
    world.there[1].ended.set()
    async with asyncio.timeout(30):
        await running


async def test_a_run_that_is_stopped_while_it_has_no_generator_ends(world: World) -> None:
    running = await world.running()
    world.has_room.clear()
    await asyncio.sleep(0)
    world.scaling.look({"a": 0})
    await world.looked(lambda: "generator-0 has left" in world.lines, look=False)
    async with asyncio.timeout(30):
        await world.pool.stop(resumable=False)
        await running


async def test_one_that_joined_and_died_is_let_go_and_replaced_and_the_buffer_gives_its_work_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, most=2)
    running = await world.running()
    await world.settled("generator-0", "generator-1")
    first = world.there[1]
    first.failing["run"] = died()
    first.ended.set()
    await world.looked(lambda: world.there[1] is not first and "generator-1" in world.pool.nodes())
    assert "generator-1 None gone" in world.told.gone and world.killed == ["generator-1"] and not running.done()
    for made in world.there.values():
        made.ended.set()
    await running


async def test_generators_that_cannot_join_end_the_run_only_where_too_few_are_there(world: World) -> None:
    running, world.failing = await world.running(), died()
    tries = world.config.run.max_restarts + 2
    await world.looked(lambda: sum("could not join" in line for line in world.lines) >= tries)
    assert not running.done() and len(world.killed) >= tries
    with pytest.raises(RunFailed, match="could not join"):
        await world.looked(lambda: False, draining={"a": 0})
    running.cancel()


async def test_a_bug_met_while_a_generator_leaves_is_raised(world: World) -> None:
    running = await world.running()
    world.there[0].failing["leave"] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await world.looked(lambda: False, draining={"a": 0})
    running.cancel()
