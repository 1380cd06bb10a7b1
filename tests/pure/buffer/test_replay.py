"""A mini-batch depends only on the journal: formed again from all its frames, it has the same bytes."""

from pathlib import Path

import pytest

from service.handoff.steps.wire import encode_mini_batch
from service.types import PolicyVersion
from tests.pure.buffer.world import World, config
from tests.recorded import KEPT

SETTINGS = config(trainer={"checkpoint_every": 2}, algorithm={"filter_zero_variance": True})


def a_run(world: World, steps: int) -> dict[int, bytes]:
    """Train with restarts and filtered groups; returns every mini-batch's bytes by step."""
    trained = {}
    for n in range(steps):
        version = PolicyVersion(world.trainer_incarnation, n)
        world.generator.finish(world.generator.claimed(version), version, rewards=(1.0, 1.0))
        for _ in range(2):
            world.generator.claimed(version)
            world.later(11)
            work = world.generator.claimed(version)
            assert work.attempts == (1, 1)
            world.generator.finish(work, version, turns=1 + n % 3)
        batch = world.batch()
        trained[n + 1] = encode_mini_batch(batch)
        world.train()
        if n % 2:
            world.buffer.covered(n + 1)
        world.journal.sync()
    return trained


@pytest.mark.parametrize("segment_bytes", [1 << 20, 10_000])
def test_every_mini_batch_of_a_run_is_formed_again_bit_by_bit(tmp_path: Path, segment_bytes: int) -> None:
    world = World(tmp_path, SETTINGS, segment_bytes=segment_bytes)
    trained = a_run(world, steps=6)
    assert (tmp_path / KEPT).is_dir() == (segment_bytes < 1 << 20)
    for step, batch in trained.items():
        assert encode_mini_batch(world.replayed(step)) == batch
