"""A publication goes from node to node; what fails on the way fails for itself alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import pytest
from ray.exceptions import ObjectLostError

from actors.weights.chain import MIN_BYTES, NodeImage, Replaced, WeightChain
from actors.weights.part import Source, WeightBucket, WeightPart
from actors.weights.weight_source import PublishedWeights, TrainerLost, WeightSource
from service.errors import Starved
from service.types import PolicyVersion
from tests.pure.actors.fakes import Method, Stores, bucket_of, died

VERSION = PolicyVersion(1, 3)
BUCKETS = 8
N_BYTES = BUCKETS * MIN_BYTES - 8
NAMES = ("a", "b", "c")


class Node:
    """Writes down from whom each bucket came; fails as told, from a bucket on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.took: dict[Any, str] = {}
        self.failing: dict[str, Any] = {}
        """Error of a bucket that comes from this giver; `any` stands for every giver."""
        self.fails_after = 0
        self.most_at_once = self._at_once = 0
        self.hold_image = Method(self._hold)
        self.write_image = Stores(self._write)

    async def _hold(self, number: int, version: int, n_bytes: int) -> str:
        assert (version, n_bytes) == (VERSION.pack(), N_BYTES)
        return f"/{self.name}/{number}"

    async def _write(self, number: int, bucket: WeightBucket, message: Any, passes_on: bool) -> tuple[Any, None]:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        giver = await message if isinstance(message, asyncio.Future) else message
        error = self.failing.get(giver, self.failing.get("any"))
        if error is not None and len(self.took) >= self.fails_after:
            if isinstance(error, BaseException):
                raise error
            await asyncio.Event().wait()
        ((start, _),) = bucket.spans
        self.took[start] = giver
        return self.name if passes_on else None, None


class Ranks:
    """Give out the buckets of one version; the part of each is what follows those of the ranks before it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.firsts = [0, *accumulate(sizes)]
        """First byte in the file of each rank's part."""
        self.error: BaseException | None = None
        self.newer_after = BUCKETS
        self.given: list[tuple[int, int]] = []

    async def bucket(self, version: PolicyVersion, rank: int, start: int, stop: int) -> tuple[WeightBucket, str] | None:
        if self.error is not None:
            raise self.error
        if len(self.given) >= self.newer_after:
            return None
        self.given.append((rank, start))
        return bucket_of(np.zeros(stop - start, np.uint8), self.firsts[rank] + start), f"rank {rank}"


class World:
    def __init__(
        self, deadline: float = 60.0, sizes: Sequence[int] = (N_BYTES,), ways: Sequence[str] = ("abc",)
    ) -> None:
        self.nodes, self.ranks, self.sizes = {name: Node(name) for name in NAMES}, Ranks(sizes), sizes
        sources = tuple(Source(WeightPart(((0, n_bytes),)), "") for n_bytes in sizes)
        weights, ranks = PublishedWeights(VERSION, sources=sources), cast(WeightSource, self.ranks)
        self.images = {name: NodeImage(weights, name, self.nodes[name], n) for n, name in enumerate(NAMES)}
        of_rank = [[self.images[name] for name in way] for way in ways]
        self.chain = WeightChain(ranks, weights, of_rank, deadline)

    @property
    def lost(self) -> dict[str, type[BaseException]]:
        """The errors of the nodes that do not have the weights."""
        return {name: type(image.error) for name, image in self.images.items() if image.error is not None}

    async def send(self) -> None:
        async with asyncio.timeout(30):
            await self.chain.send()

    def givers(self, name: str, rank: int = 0) -> list[str]:
        """Who gave a node a rank's buckets, in their order."""
        first, end = self.ranks.firsts[rank : rank + 2]
        return [self.nodes[name].took[start] for start in range(first, end, MIN_BYTES)]


async def test_rank_0_gives_each_bucket_once_and_every_node_passes_it_on_to_the_next() -> None:
    world = World()
    await world.send()
    assert [world.givers(name) for name in NAMES] == [["rank 0"] * BUCKETS, ["a"] * BUCKETS, ["b"] * BUCKETS]
    assert sorted(world.ranks.given) == [(0, start) for start in range(0, N_BYTES, MIN_BYTES)]
    assert [image.path for image in world.images.values()] == ["/a/0", "/b/1", "/c/2"] and world.lost == {}
    assert [node.most_at_once for node in world.nodes.values()] == [2, 2, 2], "a link is busy, and no more than that"


async def test_each_rank_gives_its_own_part_from_its_own_node_on_and_no_node_passes_on_more_than_one_copy() -> None:
    half = N_BYTES // 2
    world = World(sizes=[half, N_BYTES - half, 0], ways=["abc", "bca", "cab"])
    await world.send()
    of_rank_0, of_rank_1 = ([world.givers(name, rank) for name in NAMES] for rank in (0, 1))
    n = len(of_rank_0[0])
    assert of_rank_0 == [["rank 0"] * n, ["a"] * n, ["b"] * n]
    assert of_rank_1 == [["c"] * n, ["rank 1"] * n, ["b"] * n]
    assert {rank for rank, _ in world.ranks.given} == {0, 1}, "a rank without a part is not asked"
    assert [rank for rank, _ in world.ranks.given][:4] == [0, 1, 0, 1], "the links of both are busy"


async def test_where_a_node_dies_the_next_takes_from_the_one_before() -> None:
    world = World()
    world.nodes["b"].failing["any"], world.nodes["b"].fails_after = died(), 3
    await world.send()
    assert list(world.lost) == ["b"]
    assert world.givers("a") == ["rank 0"] * BUCKETS
    assert sorted(world.givers("c")) == ["a"] * (BUCKETS - 3) + ["b"] * 3


@pytest.mark.parametrize("error", [ObjectLostError("0" * 56, None, ""), "silent"])
async def test_a_node_whose_copies_do_not_arrive_is_left_out_as_a_giver_and_keeps_its_weights(error: Any) -> None:
    world = World(deadline=0.3)
    world.nodes["b"].failing["a"], world.nodes["b"].fails_after = error, 2
    await world.send()
    assert world.lost == {}
    givers = world.givers("b")
    assert givers.count("a") == 2 and givers.count("rank 0") == BUCKETS - 2
    assert set(world.givers("c")) == {"b"}


async def test_a_node_that_is_silent_is_given_up_at_the_deadline_and_the_others_have_the_weights() -> None:
    world = World(deadline=0.3)
    world.nodes["a"].failing["any"] = "silent"
    await world.send()
    assert world.lost == {"a": Starved}
    assert (world.givers("b"), world.givers("c")) == (["rank 0"] * BUCKETS, ["b"] * BUCKETS)


async def test_weights_that_were_replaced_on_the_way_are_given_up() -> None:
    world = World()
    world.ranks.newer_after = 4
    with pytest.raises(Replaced):
        await world.send()


async def test_a_trainer_that_is_lost_and_a_bug_are_raised() -> None:
    world = World()
    world.ranks.error = TrainerLost("the trainer failed")
    with pytest.raises(TrainerLost):
        await world.send()
    world = World()
    world.nodes["b"].failing["any"] = ValueError("another checksum")
    with pytest.raises(ValueError, match="another checksum"):
        await world.send()
