"""Who waits for whom, from what each part needs."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.plan.binding import Demand, Part, Side, binding

seconds = st.floats(1e-3, 1e3)
demands = st.builds(
    Demand,
    generation=st.fixed_dictionaries(dict.fromkeys((Part.ENGINES, Part.ENVIRONMENT, Part.JOURNAL), seconds)),
    training=st.fixed_dictionaries(dict.fromkeys((Part.TRAINER, Part.WEIGHTS, Part.EVALUATION), seconds)),
    engines=st.integers(1, 64),
    ranks=st.integers(1, 64),
    lookahead=st.floats(0, 32),
    concurrency=st.floats(0.5, 16),
)
HEALTHY = Demand({Part.ENGINES: 8.0, Part.ENVIRONMENT: 1.0}, {Part.TRAINER: 7.0, Part.WEIGHTS: 0.5}, 4, 4)


@given(demands)
def test_a_step_takes_at_least_the_longer_side_and_at_most_both(demand: Demand) -> None:
    both = [demand.seconds(side) for side in Side]
    assert max(both) * (1 - 1e-9) <= demand.step_seconds <= sum(both) * (1 + 1e-9)


@given(demands)
def test_more_of_anything_makes_no_run_slower(demand: Demand) -> None:
    found = binding(demand)
    assert found.gain >= 1 - 1e-9
    assert demand.gain(Part.ENGINES, Side.GENERATION) >= 1 - 1e-9
    assert demand.gain(Part.TRAINER, Side.TRAINING) >= 1 - 1e-9


def test_without_lookahead_one_side_waits_while_the_other_works() -> None:
    demand = Demand({Part.ENGINES: 3.0}, {Part.TRAINER: 1.0}, lookahead=0)
    assert demand.step_seconds == 4.0
    assert (demand.waits(Side.TRAINING), demand.waits(Side.GENERATION)) == (0.75, 0.25)


def test_the_waiting_side_of_a_much_faster_trainer_is_what_is_left_of_the_step() -> None:
    found = binding(Demand({Part.ENGINES: 10.0}, {Part.TRAINER: 4.0}, engines=1, lookahead=4))
    assert (found.side, found.part) == (Side.GENERATION, Part.ENGINES)
    assert math.isclose(found.waits, 0.6, abs_tol=0.01)
    assert found.gain == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("side", "part"),
    [
        (Side.GENERATION, Part.ENVIRONMENT),
        (Side.GENERATION, Part.JOURNAL),
        (Side.GENERATION, Part.WEIGHTS),
        (Side.GENERATION, Part.ENGINES),
        (Side.TRAINING, Part.TRAINER),
        (Side.TRAINING, Part.WEIGHTS),
        (Side.TRAINING, Part.EVALUATION),
        (Side.TRAINING, Part.CHECKPOINT),
    ],
)
def test_whatever_becomes_slow_is_named(side: Side, part: Part) -> None:
    parts = {**HEALTHY.of(side), part: 30.0}
    slow = Demand(parts, HEALTHY.training, 4, 4) if side is Side.GENERATION else Demand(HEALTHY.generation, parts, 4, 4)
    found = binding(slow)
    assert (found.side, found.part) == (side, part)
    assert found.is_usual == (part in (Part.ENGINES, Part.TRAINER)) and not found.balanced
    assert str(part) in found.sentence()


def test_two_sides_that_both_wait_are_held_by_the_lookahead() -> None:
    sides = ({Part.ENGINES: 1.0}, {Part.TRAINER: 1.0})
    measured = Demand(*sides, lookahead=1, concurrency=2, seconds_of_step=2.0)
    for demand in (measured, Demand(*sides, lookahead=1, concurrency=2)):
        found = binding(demand)
        assert found.part is Part.LOOKAHEAD and not found.is_usual and not found.balanced
        assert found.gain > 1.2 and "buffer.lookahead" in found.sentence()
    assert binding(Demand(*sides, lookahead=4, concurrency=2)).balanced


def test_two_sides_that_both_wait_are_held_by_weights_that_arrive_late() -> None:
    sides = ({Part.ENGINES: 0.6}, {Part.TRAINER: 0.5})
    late = Demand(*sides, lookahead=1, concurrency=2, arrival=2.0)
    for demand in (late, replace(late, seconds_of_step=1.9)):
        found = binding(demand)
        assert found.part is Part.WEIGHTS and not found.is_usual and not found.balanced
        assert found.gain > 1.5 and "both for new weights to arrive" in found.sentence()
    assert binding(replace(late, arrival=0.5, seconds_of_step=1.9)).part is Part.LOOKAHEAD


@pytest.mark.parametrize(("slow", "side"), [(Part.ENGINES, Side.GENERATION), (Part.TRAINER, Side.TRAINING)])
def test_two_sides_that_both_wait_are_held_by_the_one_engine_or_rank_that_is_slow(slow: Part, side: Side) -> None:
    both = Demand({Part.ENGINES: 0.6}, {Part.TRAINER: 0.5}, 2, 2, lookahead=1, seconds_of_step=1.2)
    found = binding(both, slow)
    assert (found.side, found.part) == (side, slow) and found.is_usual and not found.balanced
    assert binding(HEALTHY, slow) == binding(HEALTHY), "where one side is waited for, its parts say for what"


def test_a_run_in_balance_is_said_to_be() -> None:
    found = binding(HEALTHY)
    assert not found.balanced and found.is_usual
    near = binding(Demand(HEALTHY.generation, {Part.TRAINER: 8.8}, 4, 4))
    assert near.balanced and near.is_usual and "in balance" in near.sentence()


@pytest.mark.parametrize("part", [Part.ENGINES, Part.LOOKAHEAD])
def test_what_gains_nothing_is_no_bottleneck(part: Part) -> None:
    both_wait = Demand({Part.ENGINES: 1.0}, {Part.TRAINER: 1.0}, lookahead=4, seconds_of_step=2.0)
    beside = Demand({Part.ENGINES: 1e-3, Part.ENVIRONMENT: 9e-4}, {Part.TRAINER: 1e-3}, engines=1000, lookahead=9)
    found = binding(both_wait if part is Part.LOOKAHEAD else beside)
    assert found.part is part and not found.balanced and round(found.gain, 2) == 1
    assert not found.is_bottleneck and found.is_usual
    assert "no bottleneck" in found.sentence() and "1.00x" not in found.sentence()


def test_where_engines_and_ranks_share_cores_no_gain_is_promised() -> None:
    sides = ({Part.ENGINES: 10.0}, {Part.TRAINER: 4.0})
    assert "one more engine would give 2" in binding(Demand(*sides, lookahead=4)).sentence()
    assert (
        binding(Demand(*sides, lookahead=4, shares_cores=True))
        .sentence()
        .endswith("one more engine would give is not known")
    )
    slow_tool = Demand({Part.ENGINES: 1.0, Part.ENVIRONMENT: 9.0}, {Part.TRAINER: 4.0}, shares_cores=True)
    assert "a run without that would give 2." in binding(slow_tool).sentence()


def test_a_run_without_any_figure_binds_nowhere() -> None:
    found = binding(Demand({Part.ENGINES: 0.0}, {Part.TRAINER: 0.0}))
    assert (found.gain, found.waits, found.share) == (1.0, 0.0, 0.0)
