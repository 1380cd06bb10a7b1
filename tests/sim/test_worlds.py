"""Seeded worlds full of faults: nothing acknowledged is lost, nothing is trained twice, nothing hangs."""

from collections.abc import Callable

import msgspec
import pytest

from service.errors import RunFailed
from service.handoff.ledger.events import GroupState
from service.handoff.ledger.ledger import Ledger
from service.handoff.scoring import Answer, Scoring
from service.types import Refusal
from tests.invariant import fingerprint
from tests.sim.host import Host
from tests.sim.witness import Broken
from tests.sim.world import fault_world

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_every_promise_holds_in_worlds_full_of_faults(first: int) -> None:
    faults = answers = bad_answers = 0
    for seed in range(first, first + 10):
        world = fault_world(seed)
        world.run()
        faults += world.fault_count
        answers += world.host.answers
        bad_answers += world.host.bad_answers
    assert faults > 20 and answers > 20 and bad_answers > 2


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(10_000, 15_000, 500))
def test_every_promise_holds_in_thousands_of_worlds(first: int) -> None:
    for seed in range(first, first + 500):
        fault_world(seed).run()


def test_the_same_seed_makes_the_same_world() -> None:
    first, second = fault_world(7), fault_world(7)
    first.run()
    second.run()
    assert first.loop.events == second.loop.events
    assert fingerprint(first.host.buffer.ledger) == fingerprint(second.host.buffer.ledger)


def answers_before_the_sync(patch: Patch) -> None:
    patch.setattr(Host, "_answer", lambda self, answer, reply: reply(answer) if self.alive else None)


def loses_the_groups_of_a_released_lease(patch: Patch) -> None:
    patch.setattr(Ledger, "_wait_again", lambda self, group_id, group: None)


def takes_a_scorers_newest_answer(patch: Patch) -> None:
    def accept(self: Scoring, group_id: int, scorer: str, answer: Answer) -> Refusal | None:
        group = self._record.ledger.state.groups.get(group_id)
        if group is not None and group.state is GroupState.COMPLETE and answer.rewards is not None:
            scores = self._record.store.held[group_id].scores
            scores[scorer] = msgspec.structs.replace(scores[scorer], rewards=tuple(answer.rewards))
        return accepted(self, group_id, scorer, answer)

    accepted = Scoring.accept
    patch.setattr(Scoring, "accept", accept)


@pytest.mark.full
@pytest.mark.parametrize(
    "sabotage",
    [answers_before_the_sync, loses_the_groups_of_a_released_lease, takes_a_scorers_newest_answer],
    ids=lambda sabotage: sabotage.__name__,
)
def test_the_worlds_catch_a_buffer_that(sabotage: Callable[[Patch], None], monkeypatch: Patch) -> None:
    sabotage(monkeypatch)
    with pytest.raises((Broken, RunFailed, RecursionError)):
        for seed in range(120):
            fault_world(seed).run()
