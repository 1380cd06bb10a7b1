"""A run whose every trajectory fails ends with what fails; one in which some fail goes on."""

from __future__ import annotations

from typing import Any

import pytest

from service.errors import RunFailed
from service.handoff.steps.stop_reason import StopReason
from service.run.repeated_failures import FailureWatch


def said(failure: str = "", **ended: int) -> dict[str, Any]:
    return {"counts": {"groups": 9, **{f"end_{reason}": n for reason, n in ended.items()}}, "last_failure": failure}


ERROR = StopReason.ENVIRONMENT_ERROR


def test_when_all_fail_the_last_failure_is_the_reason() -> None:
    watch = FailureWatch(8)
    watch.check([said("KeyError: 'ground_truth'", **{ERROR: 4}), said(**{ERROR: 3})])
    with pytest.raises(RunFailed, match=r"8 environment_error\): KeyError: 'ground_truth'"):
        watch.check([said("KeyError: 'ground_truth'", **{ERROR: 4}), said(**{ERROR: 4})])


def test_one_that_ends_well_is_hope() -> None:
    FailureWatch(8).check([said("boom", **{ERROR: 500, "stop": 1})])


def test_a_step_forgives_what_was_before_it() -> None:
    watch = FailureWatch(8)
    watch.check([said("boom", **{ERROR: 7, "stop": 3})])
    watch.progressed()
    watch.check([said("boom", **{ERROR: 14, "stop": 3})])
    with pytest.raises(RunFailed, match="8 environment_error"):
        watch.check([said("boom", **{ERROR: 15, "stop": 3})])


def test_a_generator_that_started_again_counts_from_nothing() -> None:
    watch = FailureWatch(8)
    watch.check([said("boom", **{ERROR: 500, "stop": 500})])
    watch.progressed()
    watch.check([said("boom", **{ERROR: 20})])
