"""A run whose every trajectory fails ends with what fails, and its texts are safe to print."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import characters, text

from service.errors import UNSAFE, RunFailed, in_one_line, printable
from service.handoff.steps.values import StopReason
from service.run.liveness.repeated_failures import RECENT_STEPS, STARVING_SECONDS, FailureWatch
from service.run.phases import say
from service.run.records.writer import RunWriter
from tests.pure.conftest import Refused

ERROR, REWARD = StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_REWARD


def said(failure: str = "", refusals: dict[str, int] | None = None, **ended: int) -> dict[str, Any]:
    counts = {"groups": 9, **{f"end_{reason}": n for reason, n in ended.items()}}
    return {"counts": counts, "failures": {ERROR: failure} if failure else {}, "refusals": refusals or {}}


def watching() -> tuple[FailureWatch, list[str], list[str]]:
    """A watch, what it says on the terminal and what the status shows."""
    told: list[str] = []
    shown: list[str] = []
    return FailureWatch(8, told.append, shown.append), told, shown


def test_the_first_failure_with_each_reason_is_named_once() -> None:
    watch, told, _ = watching()
    for _ in range(2):
        watch.check([said("KeyError: 'ground_truth'"), said() | {"failures": {REWARD: "reward is 1e+300"}}])
    assert len(told) == 2 and "'ground_truth'" in told[0] and "1e+300" in told[1]


def test_when_all_fail_the_last_failure_is_the_reason() -> None:
    watch, *_ = watching()
    watch.check([said("KeyError: 'ground_truth'", **{ERROR: 4}), said(**{ERROR: 3})])
    with pytest.raises(RunFailed, match=r"8 environment_error\): KeyError: 'ground_truth'"):
        watch.check([said("KeyError: 'ground_truth'", **{ERROR: 4}), said(**{ERROR: 4})])


def test_one_that_ends_well_is_hope() -> None:
    watching()[0].check([said("boom", **{ERROR: 500, "stop": 1})])


def test_a_step_forgives_what_was_before_it() -> None:
    watch, *_ = watching()
    watch.stepped([said("boom", **{ERROR: 7, "stop": 3})])
    watch.check([said("boom", **{ERROR: 14, "stop": 3})])
    with pytest.raises(RunFailed, match="8 environment_error"):
        watch.check([said("boom", **{ERROR: 15, "stop": 3})])


def test_a_generator_that_started_again_counts_from_nothing() -> None:
    watch, *_ = watching()
    watch.stepped([said("boom", **{ERROR: 500, "stop": 500})])
    watch.check([said("boom", **{ERROR: 20})])


def test_a_step_that_waits_because_of_failures_says_so_once_with_the_last_reason() -> None:
    watch, told, shown = watching()
    some = [said("KeyError: 'x' (task.py:12)", {"reward": 2}, **{ERROR: 7, "stop": 1})]
    watch.check(some, waited=STARVING_SECONDS - 1)
    assert shown == [] and len(told) == 1
    for waited in (STARVING_SECONDS, STARVING_SECONDS + 2):
        watch.check(some, waited)
    assert told[1:] == [
        "the step has waited 30 s for a mini-batch; since the last step 9 failures in 8 trajectories "
        "(7 environment_error, 2 refused_reward); the last: KeyError: 'x' (task.py:12)"
    ]
    assert shown[-1] in told[1]


def test_a_step_that_waits_without_any_failure_is_not_said_to_starve() -> None:
    watch, told, shown = watching()
    watch.check([said(stop=9)], waited=1000.0)
    assert told == shown == []


@pytest.mark.parametrize(("failed", "of", "warned"), [(3, 60, True), (3, 62, False), (2, 8, False)])
def test_from_one_in_twenty_trajectories_on_failures_are_a_warning(failed: int, of: int, warned: bool) -> None:
    watch, told, shown = watching()
    watch.stepped([said("boom (task.py:3)", **{ERROR: failed, "stop": of - failed})])
    assert bool(shown[-1]) is warned is any(line.startswith("WARNING") for line in told)
    if warned:
        assert shown[-1].startswith(f"in the last step {failed} failures in {of} trajectories")
        assert "boom (task.py:3)" in shown[-1]
    assert watch.many == shown[-1]


def test_a_warning_is_said_once_and_ends_with_the_failures() -> None:
    watch, told, shown = watching()
    for step in range(2 * RECENT_STEPS):
        watch.stepped([said("boom", **{ERROR: 4, "stop": 16 * (step + 1)})])
    assert [line.partition(" ")[0] for line in told].count("WARNING") == 1
    assert shown[0] and shown[RECENT_STEPS - 2] and not shown[RECENT_STEPS]


STEERS = "\x1b[2J\x1b]0;owned\x07 and \u202e \x9b1m \ud800"
SAFE = r"\x1b[2J\x1b]0;owned\x07 and \u202e \x9b1m \ud800"


@given(text(characters()))
def test_a_printable_text_holds_nothing_that_steers_a_terminal_and_keeps_its_lines(drawn: str) -> None:
    safe = printable(drawn)
    assert not UNSAFE & {unicodedata.category(character) for character in safe if character not in "\n\t"}
    assert safe.encode().decode() == printable(safe) == safe
    assert "\n" not in in_one_line(drawn)


def test_what_a_run_says_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"a failure: {STEERS}\nand its second line")
    assert capsys.readouterr().out == f"a failure: {SAFE}\nand its second line\n"


def test_an_error_of_a_command_steers_no_terminal(refused: Refused) -> None:
    assert "\x1b" not in refused("config", "validate", "data.train=\x1b[2J.csv")


def test_the_reason_in_the_summary_steers_no_terminal(tmp_path: Path) -> None:
    RunWriter(tmp_path).write_summary({"state": "failed", "reason": STEERS, "exit_code": 1})
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == SAFE
