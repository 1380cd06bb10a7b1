"""Seeded worlds full of faults with scorers: answers in any order, late, twice, bad or never, and other scorers after
each restart. The ledger closes, nothing is trained twice, and a group has one score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from service.config import Config
from service.config.learn import TeacherConfig
from service.config.rollout import ScorerConfig
from service.errors import RunFailed
from service.handoff.buffer import Buffer
from service.handoff.ledger import events
from service.handoff.ledger.ledger import Ledger
from service.handoff.scoring import Answer, Scoring
from service.types import MiniBatch, PolicyVersion, Refusal
from tests.sim import world as worlds
from tests.sim.witness import Broken
from tests.sim.world import FaultyWorld, fault_world

JUDGE, TEACHER = ScorerConfig(use="mine:judge"), ScorerConfig(use="mine:Teacher", kind="teacher")
SCORERS: list[dict[str, ScorerConfig]] = [
    {"judge": JUDGE},
    {"judge": JUDGE.model_copy(update={"fallback": "environment_reward"})},
    {"judge": JUDGE, "style": JUDGE.model_copy(update={"combine": "add", "weight": 0.5})},
    {"teacher": TEACHER, "style": JUDGE},
    {},
]
SECONDS = 0.4
"""Mean time between two answers of scorers."""


class Scored:
    """Answers groups of a world, and compares the returns of each group in all mini-batches that have it."""

    def __init__(self, world: FaultyWorld) -> None:
        self.world, self.rng = world, np.random.default_rng((world.seed, 7))
        self.returned: dict[int, list[float]] = {}
        self.answers = 0
        started, leased = world.host.start, world.witness.leased

        def start() -> None:
            world.host.config = self.config(world.host.config)
            started()

        def received(batch: MiniBatch, version: PolicyVersion, waited: float) -> None:
            self.compare(batch)
            leased(batch, version, waited)

        world.host.start, world.witness.leased = start, received  # type: ignore[method-assign]
        world.loop.after(SECONDS, self.next)

    def config(self, config: Config) -> Config:
        """The same with other scorers."""
        return config.model_copy(update={"scorers": SCORERS[int(self.rng.integers(len(SCORERS)))]})

    def compare(self, batch: MiniBatch) -> None:
        for place, group_id in enumerate(batch.groups):
            returns = batch.return_G[batch.prompt_of_trajectory_G == place].tolist()
            if self.returned.setdefault(group_id, returns) != returns:
                raise Broken(f"group {group_id} had the returns {self.returned[group_id]}, and now has {returns}")

    def next(self) -> None:
        """A scorer answers, at random; after the last fault every answer is good."""
        world = self.world
        if world.host.alive:
            world.host.ask(self.answer, lambda answer: None)
            world.host.look_soon()
        world.loop.after(float(self.rng.exponential(SECONDS)) * (0.1 if world.is_calm() else 1.0), self.next)

    def answer(self, buffer: Buffer) -> None:
        scoring, rng = buffer.scoring, self.rng
        waiting = [(group_id, name) for name in scoring.status() for group_id in scoring.pending(name)]
        chance = 1.0 if self.world.is_calm() else rng.random()
        if chance < 0.2 and buffer.ledger.state.next_group_id:  # late, or again
            group_id = int(rng.integers(buffer.ledger.state.next_group_id))
            for name in scoring.status():
                if not scoring.awaits(group_id, name):
                    before = buffer.revision
                    assert scoring.accept(group_id, name, Answer([9.0, 9.0])) is None and buffer.revision == before
                    scoring.give_up(group_id, name, "late")
                    assert buffer.revision == before
        if not waiting:
            return
        group_id, name = waiting[int(rng.integers(len(waiting)))]
        group = buffer.ledger.state.groups[group_id]
        if 0.2 <= chance < 0.35:
            before = buffer.revision
            assert isinstance(scoring.accept(group_id, name, Answer([float("nan")] * 7)), Refusal)
            assert buffer.revision == before
        elif 0.35 <= chance < 0.45:
            scoring.give_up(group_id, name, "died")
        else:
            self.answers += 1
            kept = [trajectory for trajectory in group.trajectories if not trajectory.given_up]
            good: Any = Answer([float(rng.integers(3)) for _ in kept])
            if self.world.host.config.scorers[name].kind == "teacher":
                good = Answer(logprobs=-rng.random(sum(trajectory.tokens for trajectory in kept)).astype(np.float32))
            assert scoring.accept(group_id, name, good) is None


def scored_world(seed: int, patch: pytest.MonkeyPatch) -> Scored:
    drawn = worlds._config
    with patch.context() as within:
        algorithm = {"teacher": TeacherConfig()}
        within.setattr(
            worlds,
            "_config",
            lambda rng: (config := drawn(rng)).model_copy(
                update={"scorers": SCORERS[2], "algorithm": config.algorithm.model_copy(update=algorithm)}
            ),
        )
        return Scored(fault_world(seed))


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(100, 500, 100))])
def test_every_promise_holds_in_worlds_with_scorers(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = 0
    for seed in range(first, first + (10 if first == 0 else 100)):
        scored = scored_world(seed, monkeypatch)
        scored.world.run()
        answers += scored.answers
    assert answers > 50


def reads_other_answers_back(patch: pytest.MonkeyPatch) -> None:
    def other(payload: bytes) -> events.Scored:
        score = first(payload)
        return msgspec.structs.replace(score, rewards=score.rewards and tuple(1.0 + r for r in score.rewards))

    first = events.scored_from
    patch.setattr(events, "scored_from", other)


def forgets_who_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scoring, "pending", lambda self, scorer: [])


def leaves_ended_groups_among_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    def ended(self: Ledger, event: events.Ended) -> None:
        waiting = event.group_id in self.scoring
        first(self, event)
        if waiting:
            self.scoring[event.group_id] = None

    first = Ledger._ended
    patch.setattr(Ledger, "_ended", ended)


@pytest.mark.parametrize(
    "sabotage",
    [reads_other_answers_back, forgets_who_is_waited_for, leaves_ended_groups_among_those_that_wait],
    ids=lambda sabotage: sabotage.__name__,
)
def test_the_worlds_catch_scoring_that(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((Broken, AssertionError, RunFailed, KeyError)):
        for seed in range(20):
            scored_world(seed, monkeypatch).world.run()
