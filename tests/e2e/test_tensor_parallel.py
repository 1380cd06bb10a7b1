"""Engines of several workers, inside the placement group of a run."""

from __future__ import annotations

import pytest

from service.observe.not_learning import FRESH, LARGEST_FRACTION, MIN_TOKENS
from tests.e2e.conftest import MARK, QUICK, Drive, LeftOver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

END_SECONDS = 60


def test_an_engine_of_two_workers_serves_the_weights_that_the_trainer_publishes(
    drive: Drive, left_over: LeftOver
) -> None:
    run = drive([*QUICK, "run.max_steps=2", "generator.tensor_parallel_size=2", "weights.verify=true"])
    run.finish()
    lines = run.lines()
    assert [line["trainer/global_step"] for line in lines] == [1, 2]
    fresh = [line for line in lines if line.get(f"{FRESH}/tokens", 0) >= MIN_TOKENS]
    assert fresh
    assert all(line[f"{FRESH}/differing_fraction"] <= LARGEST_FRACTION for line in fresh)
    assert left_over(MARK, run.mark, END_SECONDS) == {}
