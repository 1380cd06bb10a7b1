"""Groups in an engine: fewer while its KV cache overflows, more again when there is room."""

from random import Random

import pytest

from actors.engine.engine_load import UNREPORTED, EngineLoad, Overflows
from actors.generator.group_limit import GroupLimit


def load(kv_cache_ratio: float = 0.5, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=10, waiting=0, kv_cache_ratio=kv_cache_ratio, preemptions=preemptions)


@pytest.mark.parametrize(
    ("most", "looks", "limits"),
    [
        (8, [(0.99, 0), (0.1, 0)], [8, 8]),
        (8, [(1.0, preemptions) for preemptions in range(1, 8)], [6, 4, 3, 2, 1, 1, 1]),
        (8, [(1.0, 5), (0.9, 5)], [6, 6]),
        (4, [(1.0, 5), (0.5, 5), (0.5, 5), (0.5, 5), (0.5, 6)], [3, 4, 4, 4, 3]),
    ],
    ids=["as configured", "a quarter fewer, never none", "old preemptions do not count", "back one by one"],
)
def test_each_look_with_new_preemptions_closes_groups_and_room_opens_them_again(
    most: int, looks: list[tuple[float, int]], limits: list[int]
) -> None:
    limit = GroupLimit(most)
    assert [limit.observe(load(*look), limit.groups) for look in looks] == limits


def test_a_limit_that_does_not_bind_is_not_raised() -> None:
    limit = GroupLimit(8)
    limit.observe(load(1.0, preemptions=1), 8)
    assert limit.observe(load(0.2, preemptions=1), 2) == 6


class ScriptedScheduler:
    """Preempts as vLLM does: a request waits, runs again after some steps, and reports with its next token."""

    def __init__(self, n_requests: int, seed: int) -> None:
        self.random = Random(seed)
        self.running, self.waiting = list(range(n_requests)), list[int]()
        self.unreported = [0] * n_requests
        self.overflows = Overflows()

    def step(self, tokens: float = 0.7) -> None:
        resumed = self.waiting[: self.random.randrange(4)]
        self.waiting = self.waiting[len(resumed) :]
        self.running += resumed
        reported = 0
        for request in self.running:
            if self.random.random() < tokens:  # the others are in the middle of their prompt
                reported += self.unreported[request]
                self.unreported[request] = 0
        self.overflows.reported(reported)

    def preempt(self, n: int) -> None:
        for request in self.running[len(self.running) - n :]:
            self.unreported[request] += 1
            self.waiting.insert(0, request)
        del self.running[len(self.running) - n :]

    def update(self) -> None:
        self.overflows.updated(len(self.running), len(self.waiting))
        self.preempt(len(self.running))

    def play(self, overflow: int) -> None:
        """Some steps, so many preemptions because the cache is full, and an update."""
        for _ in range(self.random.randrange(8)):
            self.step()
        self.preempt(overflow)
        self.update()

    def drain(self) -> None:
        while self.waiting or any(self.unreported):
            self.step(tokens=1.0)


@pytest.mark.parametrize("seed", range(20))
def test_ten_updates_under_load_leave_the_limit_as_it_is(seed: int) -> None:
    limit, engine = GroupLimit(64), ScriptedScheduler(64, seed)
    for _ in range(10):
        engine.play(overflow=0)
        assert limit.observe(EngineLoad(64, 0, 0.5, engine.overflows.preemptions), 64) == 64
    engine.drain()
    assert engine.overflows.preemptions == 0


@pytest.mark.parametrize("seed", range(20))
def test_an_overflow_amid_updates_is_counted_exactly(seed: int) -> None:
    engine = ScriptedScheduler(64, seed)
    for overflow in (2, 0, 1, 5):
        engine.play(overflow)
        engine.step()
        engine.play(overflow=0)
        engine.drain()
    assert engine.overflows.preemptions == 2 + 1 + 5


def test_requests_that_were_cancelled_after_an_update_hide_few_overflows() -> None:
    overflows = Overflows()
    overflows.updated(running=64, waiting=0)  # all are cancelled before their next token
    overflows.updated(running=2, waiting=0)
    for _ in range(2 * UNREPORTED + 1):
        overflows.reported(1)
    assert overflows.preemptions == 1
