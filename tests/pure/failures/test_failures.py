"""A run whose every trajectory fails ends with what fails, and its texts are safe to print."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import characters, text

from service.cli.parser import main
from service.errors import UNSAFE, RunFailed, in_one_line, printable
from service.handoff.steps.stop_reason import StopReason
from service.run.phases import say
from service.run.repeated_failures import FailureWatch
from service.run.writer import RunWriter

ERROR, REWARD = StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_REWARD


def said(failure: str = "", **ended: int) -> dict[str, Any]:
    counts = {"groups": 9, **{f"end_{reason}": n for reason, n in ended.items()}}
    return {"counts": counts, "failures": {ERROR: failure} if failure else {}}


def test_the_first_failure_with_each_reason_is_named_once() -> None:
    told: list[str] = []
    watch = FailureWatch(8, told.append)
    for _ in range(2):
        watch.name_new([said("KeyError: 'ground_truth'"), {"failures": {REWARD: "reward is 1e+300"}}])
    assert len(told) == 2 and "'ground_truth'" in told[0] and "1e+300" in told[1]


def test_when_all_fail_the_last_failure_is_the_reason() -> None:
    watch = FailureWatch(8, print)
    watch.check([said("KeyError: 'ground_truth'", **{ERROR: 4}), said(**{ERROR: 3})])
    with pytest.raises(RunFailed, match=r"8 environment_error\): KeyError: 'ground_truth'"):
        watch.check([said("KeyError: 'ground_truth'", **{ERROR: 4}), said(**{ERROR: 4})])


def test_one_that_ends_well_is_hope() -> None:
    FailureWatch(8, print).check([said("boom", **{ERROR: 500, "stop": 1})])


def test_a_step_forgives_what_was_before_it() -> None:
    watch = FailureWatch(8, print)
    watch.check([said("boom", **{ERROR: 7, "stop": 3})])
    watch.progressed()
    watch.check([said("boom", **{ERROR: 14, "stop": 3})])
    with pytest.raises(RunFailed, match="8 environment_error"):
        watch.check([said("boom", **{ERROR: 15, "stop": 3})])


def test_a_generator_that_started_again_counts_from_nothing() -> None:
    watch = FailureWatch(8, print)
    watch.check([said("boom", **{ERROR: 500, "stop": 500})])
    watch.progressed()
    watch.check([said("boom", **{ERROR: 20})])


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


def test_an_error_of_a_command_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "data.train=\x1b[2J.csv"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_the_reason_in_the_summary_steers_no_terminal(tmp_path: Path) -> None:
    RunWriter(tmp_path).write_summary({"state": "failed", "reason": STEERS, "exit_code": 1})
    assert json.loads((tmp_path / "summary.json").read_text())["reason"] == SAFE
