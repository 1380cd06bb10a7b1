"""What a generator does at any time."""

from __future__ import annotations

import pytest

from actors.engine import engine_load as engine_load
from actors.engine.engine_load import EngineTimes
from actors.generator import activity
from actors.generator.activity import Activity
from service.observe import recorder
from service.observe.recorder import Trace
from tests.pure.buffer.world import TurnedClock


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
