"""Who writes a node's file of weights, who holds it and until when; Ray's own part is in tests/e2e."""

from __future__ import annotations

import asyncio
import gc

import pytest

from actors.weights.checksum import PublishedWeights
from actors.weights.node_files import NodeFiles
from service.errors import Starved
from tests.pure.actors.fakes import FakeGenerator, died

pytestmark = pytest.mark.asyncio

SECONDS = 60.0
WEIGHTS, NEWER = PublishedWeights("old", 1), PublishedWeights("new", 2)


@pytest.fixture
def pair() -> tuple[NodeFiles, FakeGenerator, FakeGenerator]:
    """Two generators of one node."""
    first, second = (FakeGenerator(name, []) for name in ("first", "second"))
    return files_of(first, second), first, second


def files_of(*generators: FakeGenerator) -> NodeFiles:
    files = NodeFiles({generator.name: generator for generator in generators}, SECONDS)
    for generator in generators:
        files.register(generator.name, "node")
    return files


Pair = tuple[NodeFiles, FakeGenerator, FakeGenerator]


async def test_a_file_is_kept_as_long_as_anybody_loads_from_it_and_then_given_back(pair: Pair) -> None:
    files, first, second = pair
    async with files.path_for("first", WEIGHTS) as path:
        async with files.path_for("second", WEIGHTS) as same:
            assert path == same == "/first/1"
        assert first.paths == {path}
    assert first.paths == set()
    async with files.path_for("second", WEIGHTS) as path:
        assert path == "/second/1", "a file that was given back is not handed out"
    assert (first.written, second.written) == (1, 1)


async def test_newer_weights_have_a_file_of_their_own_and_both_are_given_back(pair: Pair) -> None:
    files, first, second = pair
    async with files.path_for("first", WEIGHTS) as old:
        async with files.path_for("second", NEWER) as new:
            assert (old, new) == ("/first/1", "/second/1")
        async with files.path_for("second", NEWER) as again:
            assert again == "/second/2"
            assert first.paths == {old}
    assert first.paths == second.paths == set()


async def test_the_end_of_an_old_file_does_not_take_the_newer_ones_place(pair: Pair) -> None:
    files, _, second = pair
    async with files.path_for("first", WEIGHTS):
        newer = files.path_for("second", NEWER)
        path = await newer.__aenter__()
    async with files.path_for("first", NEWER) as same:
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

    async def take(name: str) -> str:
        async with files.path_for(name, WEIGHTS) as path:
            return path

    by_writer, by_other = asyncio.ensure_future(take("first")), asyncio.ensure_future(take("second"))
    await asyncio.sleep(0)
    first.gate.set()
    assert await by_other == "/second/1"
    with pytest.raises(type(error)):
        await by_writer
    assert second.paths == set()


async def test_a_writer_that_never_answers_is_given_up_at_the_deadline() -> None:
    frozen = FakeGenerator("frozen", [])
    frozen.gate.clear()
    files = NodeFiles({"frozen": frozen}, 0.05)
    files.register("frozen", "node")
    with pytest.raises(Starved, match="no answer of frozen"):
        async with files.path_for("frozen", WEIGHTS):
            pass


async def test_who_gives_up_waiting_for_a_file_leaves_it_to_the_others(pair: Pair) -> None:
    files, first, _ = pair
    first.gate.clear()

    async def take(name: str) -> str:
        async with files.path_for(name, WEIGHTS) as path:
            return path

    gives_up, waits = asyncio.ensure_future(take("first")), asyncio.ensure_future(take("second"))
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.wait([gives_up])
    first.gate.set()
    assert await waits == "/first/1"
    assert first.paths == set()


async def test_a_file_that_fails_after_everybody_gave_up_waiting_is_no_forgotten_error(pair: Pair) -> None:
    files, first, _ = pair
    first.gate.clear()
    first.failing["hold"] = Starved("no answer of first")
    forgotten: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: forgotten.append(context))

    async def take() -> None:
        async with files.path_for("first", WEIGHTS):
            pass

    taking = asyncio.ensure_future(take())
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


async def test_a_holder_that_dies_takes_its_file_along_and_nobody_fails_over_giving_it_back(pair: Pair) -> None:
    files, first, second = pair
    async with files.path_for("second", WEIGHTS) as path:
        assert path == "/second/1"
        second.dies()
        second.failing["release"] = died()
        files.forget("first")
        async with files.path_for("first", WEIGHTS) as another:
            assert another == "/first/1"
    assert first.paths == set()


async def test_a_holder_that_started_again_holds_nothing_of_what_it_held(pair: Pair) -> None:
    files, first, second = pair
    async with files.path_for("first", WEIGHTS):
        first.dies()
        first.failing["release"] = died()
        files.register("first", "node")
        async with files.path_for("second", WEIGHTS) as path:
            assert path == "/second/1"
            files.register("first", "node")
            async with files.path_for("first", WEIGHTS) as same:
                assert same == path, "what another one holds is still there"
    assert second.paths == set()
