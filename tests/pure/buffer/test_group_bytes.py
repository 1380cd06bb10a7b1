"""What the configuration check accepts is never too small for the buffer, and no message exceeds its reservation."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from service.columns import bytes_per_token
from service.config import Config
from service.config.checks import problems
from service.config.core_settings import worst_bytes
from service.handoff.group_bytes import ITEM_BYTES, NOTE_BYTES
from service.handoff.steps import wire
from service.handoff.steps.tables import steps_table
from service.handoff.verbs import Assignment, Receipt
from service.types import PolicyVersion, Refusal, RefusalReason, Step, TrajectoryEnd, TrajectoryId
from tests.pure.buffer.world import START, World, config
from tests.pure.handoff import worlds

BOUNDS = ("buffer.max_group_bytes", "buffer.max_bytes", "buffer.max_journal_bytes")
LONG_NAME = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 1024


def with_bounds(of: Config, **bounds: int) -> Config:
    return of.model_copy(update={"buffer": of.buffer.model_copy(update=bounds)})


def is_accepted(made: Config) -> bool:
    return not {problem.partition(":")[0] for problem in problems(made)} & set(BOUNDS)


def full_step(of: TrajectoryId, uid: str, index: int, made: Config, version: PolicyVersion) -> Step:
    """A step as large as the limits let it be, which shares nothing with the others."""
    rng = np.random.default_rng(hash((of, index)) % (1 << 32))
    lengths = made.generator.max_input_length, made.generator.max_generate_length
    prompt, response = (rng.integers(0, 500, length).tolist() for length in lengths)
    whole = worlds.step(index, prompt, response, trajectory=of, uid=uid, version=version.pack())
    return replace(whole, note="n" * NOTE_BYTES)


def step_bytes(step: Step) -> int:
    table = steps_table([step])
    return len(table.token_ids_N) * bytes_per_token(table) + ITEM_BYTES


def accepted_within(world: World, steps: list[Step], ends: list[TrajectoryEnd], reserved: int) -> None:
    """A message is accepted, and takes no more than its reservation, in the journal and in memory."""
    before = world.buffer.status()
    answer = world.generator.send(steps, ends)
    assert isinstance(answer, Receipt), answer
    after = world.buffer.status()
    assert after.journal_position - before.journal_position <= reserved
    assert after.n_bytes - before.n_bytes <= reserved
    assert after.n_bytes <= world.settings.buffer.max_bytes


def test_a_message_whose_names_outgrow_its_reservation_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    long = replace(full_step(of, LONG_NAME, 0, world.settings, START), stop_reason=LONG_NAME)
    answer = world.generator.send([long])
    assert isinstance(answer, Refusal) and answer.reason is RefusalReason.TOO_LARGE


def test_a_memory_that_cannot_hold_a_mini_batch_is_refused() -> None:
    enough = 2 * worst_bytes(config()).group
    assert is_accepted(with_bounds(config(), max_bytes=enough))
    assert not is_accepted(with_bounds(config(), max_bytes=enough - 1))


def test_what_a_trajectory_has_sent_is_reserved_once(tmp_path: Path) -> None:
    made = config()
    world = World(tmp_path, with_bounds(made, max_bytes=2 * worst_bytes(made).group))
    work = world.generator.claimed()
    step = full_step(TrajectoryId(work.group_id, 0), work.prompt_uid, 0, made, START)
    assert isinstance(world.generator.send([step]), Receipt)
    assert isinstance(world.generator.claim(), Assignment)
    assert world.buffer.status().reserved_bytes == 2 * worst_bytes(made).group


def test_only_the_groups_of_a_lease_are_read_back_after_a_trainer_went_back(tmp_path: Path) -> None:
    world = World(tmp_path, config(trainer={"checkpoint_every": 4}))
    trained = []
    for _ in range(3):
        for _ in range(2):
            world.generator.finish(world.generator.claimed(world.buffer.version), world.buffer.version)
        of_a_batch = world.buffer.status().n_bytes
        trained.append(world.train().groups)
    world.trainer_incarnation = world.buffer.join("trainer", "trainer", START.step)
    for groups in trained:
        assert world.buffer.status().reserved_bytes == of_a_batch
        assert world.batch().groups == groups
        assert world.buffer.status().n_bytes == of_a_batch
        world.train()


def test_names_of_repeated_steps_take_no_room_in_the_journal(tmp_path: Path) -> None:
    turns = 8
    world = World(tmp_path, config(env={"max_turns": turns}))
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    steps = [
        replace(full_step(of, work.prompt_uid, index, world.settings, START), stop_reason=f"{index}{LONG_NAME[1:]}")
        for index in range(turns)
    ]
    for index in range(turns):
        accepted_within(world, steps[: index + 1], [], step_bytes(steps[index]))


def test_a_trajectory_that_outgrows_its_part_of_the_group_is_refused(tmp_path: Path) -> None:
    made = config()
    one_turn = made.algorithm.n_samples_per_prompt * (worst_bytes(made).step + ITEM_BYTES)
    world = World(tmp_path, with_bounds(made, max_group_bytes=one_turn))
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    turns = [full_step(of, work.prompt_uid, index, world.settings, START) for index in range(2)]
    assert isinstance(world.generator.send(turns[:1]), Receipt)
    answer = world.generator.send(turns[1:])
    assert isinstance(answer, Refusal) and answer.reason is RefusalReason.TOO_LARGE
    assert "max_group_bytes" in answer.path


def test_a_header_longer_than_its_steps_count_is_not_journalled_as_it_came(tmp_path: Path) -> None:
    world = World(tmp_path)
    work = world.generator.claimed()
    message = world.generator.message([full_step(TrajectoryId(work.group_id, 0), work.prompt_uid, 0, config(), START)])
    magic, kind, version, head_bytes, *_ = wire.PREFIX.unpack_from(message)
    head = message[wire.PREFIX.size : wire.PREFIX.size + head_bytes]
    junk = b"".join(map(msgspec.msgpack.encode, ("generator", "x" * 50_000)))
    repeated = bytes([head[0] + 1]) + junk + head[1:]
    padding = bytes(-(wire.PREFIX.size + len(repeated)) % wire.ALIGNMENT)
    old_start = wire.PREFIX.size + head_bytes + -(wire.PREFIX.size + head_bytes) % wire.ALIGNMENT
    body = repeated + padding + message[old_start:]
    prefix = (magic, kind, version, len(repeated), len(body) - len(repeated), xxhash.xxh3_64_intdigest(body))
    before = world.journal.position
    assert isinstance(world.buffer.submit(wire.PREFIX.pack(*prefix) + body), Receipt)
    assert world.journal.position - before < len(junk)
