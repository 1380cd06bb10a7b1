from pathlib import Path

import pytest

from tests.pure.buffer.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_mini_batch_holds_the_groups_that_finished_first(world: World) -> None:
    first, second, third = (world.generator.claimed() for _ in range(3))
    world.generator.finish(third)
    world.generator.finish(first)
    assert world.batch().groups == (third.ordinal, first.ordinal)
    assert second.ordinal == 1
