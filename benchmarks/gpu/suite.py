"""tests/gpu: a line a test, as soon as it has ended."""

from __future__ import annotations

import os
from typing import Any

import pytest

from benchmarks.gpu.parts import REASON_CHARACTERS, Give


class _Recorder:
    """A pytest plugin that hands over each test's outcome."""

    def __init__(self, give: Give) -> None:
        self._give = give

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, or that is skipped as a whole."""
        if not report.passed:
            self._hand_over(report, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The call of a test, or the phase before or after it that ended it."""
        if report.when == "call" or not report.passed:
            self._hand_over(report, report.duration)

    def _hand_over(self, report: pytest.CollectReport | pytest.TestReport, seconds: float) -> None:
        told: Any = report.longrepr
        reason = told[2] if report.skipped and isinstance(told, tuple) else report.longreprtext
        last = (reason.strip().splitlines() or [""])[-1][:REASON_CHARACTERS]
        name = report.nodeid.partition("::")[2] or report.nodeid
        self._give({"test": name, "outcome": report.outcome, "seconds": round(seconds, 2), "reason": last})


def measure(device: str, give: Give) -> None:
    """Run the tests without this project's pytest settings, whose plugins a machine may lack."""
    folder = "tests/gpu"
    options = ["-c", os.devnull, "--rootdir=.", "--confcutdir", folder, "--import-mode=importlib", "-q", "--tb=short"]
    code = pytest.main(
        [*options, "-p", "no:cacheprovider", "--continue-on-collection-errors", folder], plugins=[_Recorder(give)]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest {folder} ended with {pytest.ExitCode(code).name}")
