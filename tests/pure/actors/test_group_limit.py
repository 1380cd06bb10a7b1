"""Groups in an engine: fewer while its KV cache overflows, more again with room; what a generator does meanwhile."""

import pytest

from actors.engine import engine_load as engine_load
from actors.engine.engine_load import UNREPORTED, EngineLoad, EngineTimes, Overflows
from actors.generator import activity
from actors.generator.activity import Activity
from actors.generator.group_limit import GroupLimit
from service.observe import recorder
from service.observe.recorder import Trace
from tests.pure.buffer.world import TurnedClock


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


def test_overflows_amid_updates_are_counted_exactly_though_preemptions_are_reported_late() -> None:
    overflows = Overflows()
    for running, reported in ((64, (40, 0, 24)), (62, (0, 62, 2)), (59, (64,)), (64, (2, 62))):
        overflows.updated(running, waiting=64 - running)  # those that wait were preempted by a full cache before
        for n in reported:
            overflows.reported(n)
    assert overflows.preemptions == 2 + 5


def test_requests_that_were_cancelled_after_an_update_hide_few_overflows() -> None:
    overflows = Overflows()
    overflows.updated(running=64, waiting=0)  # all are cancelled before their next token
    overflows.updated(running=2, waiting=0)
    for _ in range(2 * UNREPORTED + 1):
        overflows.reported(1)
    assert overflows.preemptions == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TurnedClock:
    made = TurnedClock()
    for module in (activity, engine_load):
        monkeypatch.setattr(module.time, "monotonic", made.monotonic)
    monkeypatch.setattr(recorder.States.__init__, "__defaults__", (made.monotonic,))
    return made


def test_the_states_of_a_generator_follow_its_engine_and_it_waits_only_without_group_and_evaluation(
    clock: TurnedClock,
) -> None:
    engine = EngineTimes()
    doing = Activity(Trace(), engine)
    assert doing.elapsed == doing.seconds == 0.0
    doing.begin()
    clock.now += 2
    assert doing.busy("lookahead") == 2.0 and doing.busy("claim") is None
    clock.now += 1  # the environment prepares
    with engine.request() as seconds_of:
        clock.now += 2
        engine.pause()
        engine.pause()  # an update that failed is tried again
        clock.now += 3
        assert engine.resume() == 3.0
        clock.now += 4
        assert seconds_of(None) == {"pause": 3.0}
    clock.now += 5
    doing.idle()
    clock.now += 1
    assert (doing.seconds, doing.elapsed) == (3.0, 18.0)
    with doing.evaluating():
        clock.now += 4
    assert doing.busy("claim") == 1.0
    states = {"starting": 0.0, "waiting": 3.0, "environment": 6.0, "generating": 6.0, "paused": 3.0}
    assert doing.by_state() == states | {"evaluating": 4.0}
