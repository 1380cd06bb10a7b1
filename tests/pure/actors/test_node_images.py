"""Who writes a node's image of weights, and who loads it; Ray's own part is in tests/e2e."""

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

from actors.weights import node_images
from actors.weights.node_images import MAX_FAILURES, NodeImages
from actors.weights.part import PublishedWeights, Source, TrainerLost, WeightBucket, WeightPart
from service.errors import Starved
from service.types import PolicyVersion
from tests.pure.actors.fakes import FakeGenerator, FakeRank0, Method, died, published

WEIGHTS, NEWER = published(1), published(2)


class World:
    """Generators on nodes, `name@node`, and the trainer."""

    def __init__(self, *places: str, rank_0: FakeRank0 | None = None, deadline: float = 60.0) -> None:
        self.rank_0, self.sent = rank_0 or FakeRank0(), list[int]()
        self.by_name = {place.partition("@")[0]: FakeGenerator(place.partition("@")[0], []) for place in places}
        self.generators = list(self.by_name.values())
        self.images = NodeImages(self.by_name, self.rank_0, deadline, self.sent.append)  # type: ignore[arg-type]
        for place in places:
            self.images.register(*place.split("@"))

    async def take(self, name: str, weights: PublishedWeights = WEIGHTS) -> str | None:
        """The path from which a generator loads."""
        sources = await self.images.sources_for(name, weights)
        return None if sources is None else sources[0].path


@pytest.fixture
def pair() -> World:
    """Two generators of one node."""
    return World("first@node", "second@node")


async def test_the_engines_of_a_node_load_one_image_of_each_version_and_no_older_one(pair: World) -> None:
    assert [await pair.take(name) for name in ("first", "second", "first")] == ["/first/1"] * 3
    assert [await pair.take(name, NEWER) for name in ("second", "first")] == ["/second/1"] * 2
    assert await pair.take("first") is None, "newer weights are on their way to it"


@pytest.mark.parametrize("error", [died(), Starved("no answer")])
async def test_where_the_writer_fails_the_next_generator_writes_and_only_the_writer_hears_of_it(
    pair: World, error: BaseException
) -> None:
    first, _ = pair.generators
    first.gate.clear()
    first.failing["hold"] = error
    by_writer, by_other = (asyncio.ensure_future(pair.take(name)) for name in ("first", "second"))
    await asyncio.sleep(0)
    first.gate.set()
    assert await by_other == "/second/1"
    with pytest.raises(type(error)):
        await by_writer


async def test_a_writer_that_never_answers_is_given_up_at_the_deadline() -> None:
    world = World("frozen@node", deadline=0.15)
    world.generators[0].gate.clear()
    with pytest.raises(Starved, match="no answer of frozen"):
        await world.take("frozen")


async def test_who_gives_up_waiting_for_an_image_leaves_it_to_the_others(pair: World) -> None:
    pair.generators[0].gate.clear()
    gives_up, waits = (asyncio.ensure_future(pair.take(name)) for name in ("first", "second"))
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.wait([gives_up])
    pair.generators[0].gate.set()
    assert await waits == "/first/1"


async def test_the_images_of_a_holder_that_died_or_started_again_are_written_anew_by_another(pair: World) -> None:
    assert await pair.take("second") == "/second/1"
    pair.images.forget("first")  # which could not open it
    assert await pair.take("first") == "/first/1"
    pair.images.register("first", "node")
    assert await pair.take("second") == "/second/1"
    pair.images.register("first", "node")
    assert await pair.take("first") == "/second/1", "what another one holds is still there"


async def test_of_weights_that_rank_0_has_replaced_nothing_is_held(pair: World) -> None:
    pair.rank_0.newest = NEWER.version
    assert await pair.take("first") is None
    assert await pair.take("first", NEWER) == "/first/1", "no image was begun for the old ones"


async def test_weights_go_to_one_generator_of_each_node_each_byte_once_and_two_buckets_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_images, "BUCKET_BYTES", 4)
    world, took, at_once = World("far@a", "near@b", "beside far@a"), Counter[tuple[str, int]](), list[int]()
    world.rank_0.nodes = ("of rank 0", "of rank 1", "of rank 2")

    async def bucket(version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, None]:
        return WeightBucket(((6 * rank + start, stop - start),), 0), None

    world.rank_0.bucket = bucket  # type: ignore[method-assign,assignment]
    for generator in world.generators:
        under_way = set[int]()

        async def writing(
            version: int, bucket: WeightBucket, message: Any, name: str = generator.name, now: set[int] = under_way
        ) -> None:
            now.add(start := bucket.spans[0][0])
            await asyncio.sleep(0.001)
            at_once.append(len(now))
            now.remove(start)
            took[name, start] += 1

        generator.write_image = Method(writing)
    weights = published(1, *(Source(WeightPart(((start, 6),)), "") for start in (0, 6, 12)))
    world.images.begin(list(world.by_name), weights)
    assert [await world.take(name, weights) for name in ("beside far", "near")] == ["/far/1", "/near/1"]
    assert took == {(name, start): 1 for name in ("near", "far") for start in (0, 4, 6, 10, 12, 16)}
    assert max(at_once) == 2


async def test_a_lost_rank_is_told_to_all_who_wait_and_a_lost_node_to_its_own_only() -> None:
    world = World("first@a", "second@b")
    world.generators[1].failing["hold"] = died()
    world.images.begin(list(world.by_name), WEIGHTS)
    assert await world.take("first") == "/first/1"
    assert await world.take("second") == "/second/1", "it failed once, and is tried again"

    async def lost(*arguments: Any) -> Any:
        raise TrainerLost("no answer of trainer-0")

    world.rank_0.bucket = lost  # type: ignore[method-assign]
    world.images.begin(list(world.by_name), NEWER)
    for name in world.by_name:
        with pytest.raises(TrainerLost):
            await world.take(name, NEWER)


async def test_a_generator_that_leaves_while_weights_are_on_their_way_keeps_nobody_from_them() -> None:
    world = World("leaves@a", "stays@b")
    world.images.begin(["leaves", "stays"], WEIGHTS)
    world.by_name.pop("leaves").failing["hold"] = died()
    assert await world.take("stays") == "/stays/1"


async def test_only_nodes_that_could_not_read_get_buckets_and_after_some_failures_all_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world, step = World("a@1", "b@2", "c@3"), 0

    async def buckets() -> int:
        """The buckets that one more publication sends."""
        nonlocal step
        step, before = step + 1, world.rank_0.buckets
        world.images.begin(list(world.by_name), published(step))
        assert await world.take("b", world.images._held["2"].weights) is not None
        return world.rank_0.buckets - before

    assert await buckets() > 0, "the rank has no NIXL"
    world.rank_0.remote = FakeRank0(nixl=True).remote
    assert await buckets() == 0
    assert world.sent == [48, 48], "to each of three nodes"
    assert [each.read_from for each in world.generators] == [["rank"]] * 3
    world.generators[1].unread = ["no route"] * MAX_FAILURES
    assert [await buckets() > 0 for _ in range(MAX_FAILURES)] == [True] * MAX_FAILURES
    assert await buckets() > 0, "it is not tried any more"
    assert [record.message for record in caplog.records] == [
        "weights go to other hosts through Ray's object store: NIXL cannot be imported",
        "weights go to other hosts with NIXL",
        "weights go to other hosts through Ray's object store: no route",
    ]


async def test_a_read_that_hangs_inside_nixl_leaves_its_node_to_the_buckets_and_a_death_costs_its_own_node() -> None:
    world = World("a@1", "b@2", rank_0=FakeRank0(nixl=True), deadline=0.6)
    world.generators[0].reading.clear()
    world.images.begin(["a", "b"], WEIGHTS)
    assert [await world.take(name) for name in ("a", "b")] == ["/a/1", "/b/1"]
    assert world.rank_0.buckets > 0
    world = World("a@1", "b@2", rank_0=FakeRank0(nixl=True))
    world.generators[0].failing["hold"] = died()
    world.images.begin(["a", "b"], WEIGHTS)
    with pytest.raises(type(died())):
        await world.take("a")
    assert await world.take("b") == "/b/1" and world.rank_0.buckets == 0
