"""Who writes a node's image of weights, who holds it and until when; Ray's own part is in tests/e2e."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from actors.weights import image, node_images
from actors.weights.image import ImageHolder
from actors.weights.node_images import NodeImages
from actors.weights.part import Source, WeightBucket, WeightPart
from actors.weights.policy_tensors import checksum_of
from actors.weights.weight_source import PublishedWeights, TrainerLost
from service.errors import Starved, WeightsGone
from service.types import PolicyVersion
from tests.pure.actors.fakes import ONE_BUCKET, FakeGenerator, FakeRank0, Method, content, died, path_for

WEIGHTS = PublishedWeights(PolicyVersion(1, 1), sources=ONE_BUCKET)
NEWER = PublishedWeights(PolicyVersion(1, 2), sources=ONE_BUCKET)


@pytest.fixture
def pair() -> tuple[NodeImages, FakeGenerator, FakeGenerator]:
    """Two generators of one node."""
    first, second = (FakeGenerator(name, []) for name in ("first", "second"))
    return files_of(first, second), first, second


def files_of(*generators: FakeGenerator, rank_0: FakeRank0 | None = None, deadline: float = 60.0) -> NodeImages:
    by_name = {generator.name: generator for generator in generators}
    files = NodeImages(by_name, rank_0 or FakeRank0(), deadline)  # type: ignore[arg-type]
    for generator in generators:
        files.register(generator.name, "node")
    return files


async def take(files: NodeImages, name: str) -> str | None:
    """The path from which a generator loads."""
    async with path_for(files, name, WEIGHTS) as path:
        return path


Pair = tuple[NodeImages, FakeGenerator, FakeGenerator]


async def test_an_image_is_kept_as_long_as_anybody_loads_from_it_and_then_given_back(pair: Pair) -> None:
    files, first, second = pair
    async with path_for(files, "first", WEIGHTS) as path:
        async with path_for(files, "second", WEIGHTS) as same:
            assert path == same == "/first/1"
        assert first.paths == {path}
    assert first.paths == set()
    async with path_for(files, "second", WEIGHTS) as path:
        assert path == "/second/1", "a file that was given back is not handed out"
    assert (first.written, second.written) == (1, 1)


async def test_newer_weights_have_an_image_of_their_own_and_both_are_given_back(pair: Pair) -> None:
    files, first, second = pair
    async with path_for(files, "first", WEIGHTS) as old:
        async with path_for(files, "second", NEWER) as new:
            assert (old, new) == ("/first/1", "/second/1")
        async with path_for(files, "second", NEWER) as again:
            assert again == "/second/2"
            assert first.paths == {old}
    assert first.paths == second.paths == set()


async def test_the_end_of_an_old_file_does_not_take_the_newer_ones_place(pair: Pair) -> None:
    files, _, second = pair
    async with path_for(files, "first", WEIGHTS):
        newer = path_for(files, "second", NEWER)
        path = await newer.__aenter__()
    async with path_for(files, "first", NEWER) as same:
        assert same == path
    await newer.__aexit__(None, None, None)
    assert second.paths == set()


@pytest.mark.parametrize("error", [died(), Starved("no answer")])
async def test_where_the_writer_fails_the_next_generator_writes_and_only_the_writer_hears_of_it(
    pair: Pair, error: BaseException
) -> None:
    files, first, second = pair
    first.gate.clear()
    first.failing["hold"] = error

    by_writer, by_other = (asyncio.ensure_future(take(files, name)) for name in ("first", "second"))
    await asyncio.sleep(0)
    first.gate.set()
    assert await by_other == "/second/1"
    with pytest.raises(type(error)):
        await by_writer
    assert second.paths == set()


async def test_a_writer_that_never_answers_is_given_up_at_the_deadline() -> None:
    frozen = FakeGenerator("frozen", [])
    frozen.gate.clear()
    files = files_of(frozen, deadline=0.15)
    with pytest.raises(Starved, match="no answer of frozen"):
        async with path_for(files, "frozen", WEIGHTS):
            pass


async def test_who_gives_up_waiting_for_an_image_leaves_it_to_the_others(pair: Pair) -> None:
    files, first, _ = pair
    first.gate.clear()

    gives_up, waits = (asyncio.ensure_future(take(files, name)) for name in ("first", "second"))
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.wait([gives_up])
    first.gate.set()
    assert await waits == "/first/1"
    assert first.paths == set()


async def test_an_image_that_fails_after_everybody_gave_up_waiting_is_no_forgotten_error(pair: Pair) -> None:
    files, first, _ = pair
    first.gate.clear()
    first.failing["hold"] = Starved("no answer of first")
    forgotten: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: forgotten.append(context))

    taking = asyncio.ensure_future(take(files, "first"))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    first.gate.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert first.failing == {}, "the file failed"
    files.forget("first")
    gc.collect()
    assert forgotten == []


async def test_an_image_that_nobody_waits_for_any_more_is_given_back_when_it_is_whole(pair: Pair) -> None:
    files, first, _ = pair
    first.gate.clear()
    async with files.spread(["first"], WEIGHTS):
        pass
    async with files.spread(["first"], NEWER):
        first.gate.set()
        async with path_for(files, "first", NEWER) as path:
            assert path == "/first/2"
    for _ in range(5):
        await asyncio.sleep(0)
    assert first.paths == set()


async def test_who_asks_in_the_moment_in_which_an_image_fails_begins_another_one(pair: Pair) -> None:
    files, first, _ = pair
    first.failing["hold"] = Starved("no answer of first")
    taking = asyncio.ensure_future(path_for(files, "first", WEIGHTS).__aenter__())
    await asyncio.sleep(0)
    (failing,) = files._held.values()
    asks = path_for(files, "second", WEIGHTS)
    asking: Any = asks.__aenter__()
    set_arrived = failing.arrived.set

    def arrives() -> None:
        set_arrived()
        asking.send(None)  # before anything that the failure has woken up

    failing.arrived.set = arrives  # type: ignore[method-assign]
    with pytest.raises(Starved):
        await taking
    (held,) = files._held.values()
    await held.arrived.wait()
    assert held is not failing and held.path == "/second/1"
    asking.close()


async def test_a_holder_that_dies_takes_its_file_along_and_nobody_fails_over_giving_it_back(pair: Pair) -> None:
    files, first, second = pair
    async with path_for(files, "second", WEIGHTS) as path:
        assert path == "/second/1"
        second.dies()
        second.failing["release"] = died()
        files.forget("first")
        async with path_for(files, "first", WEIGHTS) as another:
            assert another == "/first/1"
    assert first.paths == set()


async def test_a_holder_that_started_again_holds_nothing_of_what_it_held(pair: Pair) -> None:
    files, first, second = pair
    async with path_for(files, "first", WEIGHTS):
        first.dies()
        first.failing["release"] = died()
        files.register("first", "node")
        async with path_for(files, "second", WEIGHTS) as path:
            assert path == "/second/1"
            files.register("first", "node")
            async with path_for(files, "first", WEIGHTS) as same:
                assert same == path, "what another one holds is still there"
    assert second.paths == set()


async def test_of_weights_that_rank_0_has_replaced_nothing_is_held() -> None:
    first, rank_0 = FakeGenerator("first", []), FakeRank0()
    files = files_of(first, rank_0=rank_0)
    rank_0.newest = NEWER.version
    async with path_for(files, "first", WEIGHTS) as path:
        assert path is None
    assert first.paths == set()
    async with path_for(files, "first", NEWER) as path:
        assert path == "/first/1", "no image was begun for the old ones"


async def test_weights_go_to_one_generator_of_each_node_each_byte_once_and_two_buckets_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_images, "BUCKET_BYTES", 4)
    generators = [FakeGenerator(name, []) for name in ("far", "near", "beside far")]
    rank_0 = FakeRank0()
    rank_0.nodes = ("of rank 0", "of rank 1", "of rank 2")

    async def bucket(version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, None]:
        return WeightBucket(((6 * rank + start, stop - start),), 0), None

    rank_0.bucket = bucket  # type: ignore[method-assign,assignment]
    files, took, at_once = files_of(*generators, rank_0=rank_0), Counter[tuple[str, int]](), list[int]()
    for generator, node in zip(generators, ("a", "b", "a"), strict=True):
        files.register(generator.name, node)
        under_way = set[int]()

        async def writing(
            number: int, bucket: WeightBucket, message: Any, name: str = generator.name, now: set[int] = under_way
        ) -> None:
            now.add(start := bucket.spans[0][0])
            await asyncio.sleep(0.001)
            at_once.append(len(now))
            now.remove(start)
            took[name, start] += 1

        generator.write_image = Method(writing)
    sources = tuple(Source(WeightPart(((start, 6),)), "") for start in (0, 6, 12))
    weights = PublishedWeights(PolicyVersion(1, 1), sources=sources)
    async with files.spread([generator.name for generator in generators], weights):
        async with path_for(files, "beside far", weights) as path:
            assert path == "/far/1"
        assert [generator.written for generator in generators] == [1, 1, 0]
    assert took == {(name, start): 1 for name in ("near", "far") for start in (0, 4, 6, 10, 12, 16)}
    assert max(at_once) == 2
    assert all(not generator.paths for generator in generators)


async def test_a_lost_rank_is_told_to_all_who_wait_and_a_lost_node_to_its_own_only() -> None:
    rank_0, first, second = FakeRank0(), FakeGenerator("first", []), FakeGenerator("second", [])
    files = files_of(first, second, rank_0=rank_0)
    files.register("second", "another node")
    second.failing["hold"] = died()
    async with files.spread(["first", "second"], WEIGHTS):
        async with path_for(files, "first", WEIGHTS) as path:
            assert path == "/first/1"
        async with path_for(files, "second", WEIGHTS) as path:
            assert path == "/second/2", "it failed once, and is tried again"

    async def lost(*arguments: Any) -> Any:
        raise TrainerLost("no answer of trainer-0")

    rank_0.bucket = lost  # type: ignore[method-assign]
    async with files.spread(["first", "second"], NEWER):
        for name in ("first", "second"):
            with pytest.raises(TrainerLost):
                async with path_for(files, name, NEWER):
                    pass
    assert first.paths == second.paths == set()


async def test_a_generator_that_leaves_while_weights_are_on_their_way_keeps_nobody_from_them() -> None:
    stays, leaves = FakeGenerator("stays", []), FakeGenerator("leaves", [])
    generators = {"leaves": leaves, "stays": stays}
    files = NodeImages(generators, FakeRank0(), 60.0)  # type: ignore[arg-type]
    for name in generators:
        files.register(name, f"node of {name}")
    async with files.spread(["leaves", "stays"], WEIGHTS):
        del generators["leaves"]
        leaves.failing["hold"] = died()
        async with path_for(files, "stays", WEIGHTS) as path:
            assert path == "/stays/1"
    assert stays.paths == set()


async def test_a_write_that_is_late_for_its_image_does_not_reach_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    verify, holder = image.verify, ImageHolder()
    older, newer = np.full(16, 1, np.uint8), np.full(16, 2, np.uint8)

    def late(message: Any, checksum: int) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return verify(message, checksum)

    async def write(number: int, octets: np.ndarray) -> None:
        await holder.write_image(number, WeightBucket(((0, 16),), checksum_of(octets)), octets)

    path = await holder.hold_image(1, 1, 16)
    monkeypatch.setattr(image, "verify", late)
    writing = asyncio.ensure_future(write(1, older))
    await asyncio.to_thread(begun.wait, 60)
    await holder.release_image(1)  # by a driver that does not wait for the write any more
    monkeypatch.setattr(image, "verify", verify)
    assert await holder.hold_image(2, 2, 16) == path, "in the same memory"
    await write(2, newer)
    goes_on.set()
    with pytest.raises(WeightsGone):
        await writing
    assert content(holder._images[2]) == newer.tobytes()
