"""Steps of roles that are not trained: no loss and fates of their own, also after a crash, a repetition, a rollback."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.handoff.ledger.events import Fate
from service.handoff.steps.tables import end_objects
from service.handoff.steps.values import Role, packed_roles
from service.handoff.verbs import Receipt
from service.types import MiniBatch, Step, TrajectoryEnd, TrajectoryId
from tests.invariant import violations
from tests.pure.buffer.world import World, config, step

UNTRAINED = {Fate.SUB: 0, Fate.AUX: 2, Fate.RETRY: 2, Fate.UNDELIVERED: 2}
"""Of one trajectory of `ROLES_OF_STEPS`, whose steps have 2 tokens each, and sub-agents trained."""
ROLES_OF_STEPS = (Role.AUX, Role.MAIN, Role.SUB, Role.RETRY, Role.UNDELIVERED, Role.MAIN)
SETTINGS = {
    "env": {"name": "agent", "command": ["true"]},
    "agents": {"max_calls": 8},
    "trainer": {"checkpoint_every": 1},
    "buffer": {"lookahead": 2},
}


def agent_steps(of: TrajectoryId, uid: str) -> list[Step]:
    """A title; a conversation of two calls; beside it a sub-agent, and two more responses to the second request."""
    first, then = step(of, uid, 0, first=100), step(of, uid, 1, first=100)
    numbered = [step(of, uid, 0, first=10), first, step(of, uid, 0, first=300), then, then, then]
    return [
        replace(made, index=index, response_ids=made.response_ids + np.int32(index), extends=None)
        for index, made in enumerate(numbered)
    ]


def played(world: World, n_groups: int = 2, transcript: bytes = b"") -> list[bytes]:
    """Groups whose trajectories have steps of all roles; the messages."""
    messages = []
    for _ in range(n_groups):
        work = world.generator.claimed()
        for sample in work.samples:
            of = TrajectoryId(work.group_id, sample)
            steps = agent_steps(of, work.prompt_uid)
            end = TrajectoryEnd(
                of, work.prompt_uid, len(steps), "stop", float(sample), packed_roles(ROLES_OF_STEPS), transcript
            )
            messages.append(world.generator.message(steps, [end]))
            receipt = world.buffer.submit(messages[-1])
            assert isinstance(receipt, Receipt), receipt
    return messages


def loss_tokens(batch: MiniBatch) -> list[int]:
    return sorted(
        int(token) for rank in batch.ranks for micro in rank for token in micro.token_ids_N[micro.loss_mask_N]
    )


def fates(world: World) -> dict[Fate, int]:
    assert violations(world.buffer.ledger) == [] and world.closes()
    return {fate: tokens for fate, tokens in world.buffer.ledger.state.fates.items() if tokens}


@pytest.mark.parametrize("merge", ["off", "linear", "tree"])
def test_only_tokens_of_trained_roles_carry_loss_however_their_rows_are_merged(tmp_path: Path, merge: str) -> None:
    world = World(tmp_path, config(**SETTINGS | {"buffer": {"merge": merge}}))
    played(world)
    of = agent_steps(TrajectoryId(0, 0), "p0")
    trained = [of[index].response_ids for index, role in enumerate(ROLES_OF_STEPS) if role in (Role.MAIN, Role.SUB)]
    batch = world.train()
    assert loss_tokens(batch) == sorted(4 * np.concatenate(trained).tolist())
    assert batch.metrics["tokens/untrained"] == 4 * sum(UNTRAINED.values()) and batch.metrics["tokens/masked"] == 0
    assert fates(world) == {Fate.STEPPED: 24} | {fate: 4 * n for fate, n in UNTRAINED.items() if n}


def test_what_a_judge_said_has_a_fate_of_its_own_and_no_loss(tmp_path: Path) -> None:
    world = World(tmp_path, config(roles={"verifier": {}, "judge": {"mode": "judge"}}))
    for _ in range(2):
        work = world.generator.claimed()
        for sample in work.samples:
            roles = packed_roles(["main", "judge", "verifier"], list(world.settings.roles))
            answer = world.generator.play(work, sample, 3, roles=roles, rewards=(1.0, 0.0, 0.5))
            assert isinstance(answer, Receipt)
    before = world.train()
    assert fates(world) == {Fate.STEPPED: 16, Fate.JUDGE: 8}
    world.crash()
    assert fates(world) == {Fate.STEPPED: 16, Fate.JUDGE: 8}
    world.journal.sync()
    assert before.metrics["role/verifier/reward"] == 0.5 and before.metrics["role/judge/turns"] == 1.0


def test_fates_are_the_same_after_repetitions_a_crash_a_rollback_and_a_replay(tmp_path: Path) -> None:
    world = World(tmp_path, config(**SETTINGS))
    messages = played(world, transcript=b"what it wrote")
    for message in messages:
        assert isinstance(answer := world.buffer.submit(message), Receipt) and answer.duplicate
    before = world.train()
    stepped = fates(world)
    world.crash()
    assert fates(world) == stepped
    world.buffer.join("trainer", "trainer", 0)
    assert fates(world) == {Fate.ROLLED_BACK: 48}
    world.trainer_incarnation = world.buffer.ledger.state.trainer_incarnation
    again = world.train()
    assert fates(world) == stepped and loss_tokens(again) == loss_tokens(before)
    world.buffer.covered(1)
    assert fates(world) == {Fate.TRAINED: 24} | {fate: n for fate, n in stepped.items() if fate is not Fate.STEPPED}
    world.journal.sync()
    assert loss_tokens(world.replayed(1)) == loss_tokens(before)


def test_an_end_comes_back_as_it_was_sent_and_counts_with_its_text(tmp_path: Path) -> None:
    world = World(tmp_path, config(**SETTINGS))
    played(world, 1)
    plain = world.buffer.status().n_bytes
    played(world, 1, "ähm\n".encode() * 100)
    assert world.buffer.status().n_bytes == 2 * plain + 2 * 500
    world.crash()
    assert world.buffer.status().n_bytes == 2 * plain + 2 * 500
    _, ends = world.buffer._record.store.unscored(1)
    assert [(end.roles, end.transcript) for end in end_objects(ends)] == [
        (packed_roles(ROLES_OF_STEPS), "ähm\n".encode() * 100)
    ] * 2
