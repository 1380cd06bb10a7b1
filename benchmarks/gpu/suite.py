"""Runs tests of tests/gpu, and reports a line for each test as soon as it has ended."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.figures import not_run
from benchmarks.gpu.parts import REASON_CHARACTERS, ROOT, Give

if TYPE_CHECKING:
    import pytest


class _Recorder:
    """A pytest plugin that reports each test's outcome."""

    def __init__(self, give: Give) -> None:
        self._give = give
        self.reported = False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a file that cannot be imported, or that is skipped as a whole."""
        if not report.passed:
            self._hand_over(report, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Report the call of a test, or the phase before or after the call in which the test failed or was skipped."""
        if report.when == "call" or not report.passed:
            self._hand_over(report, report.duration)

    def _hand_over(self, report: pytest.CollectReport | pytest.TestReport, seconds: float) -> None:
        told: Any = report.longrepr
        reason = told[2] if report.skipped and isinstance(told, tuple) else report.longreprtext
        last = (reason.strip().splitlines() or [""])[-1][:REASON_CHARACTERS]
        name = report.nodeid.partition("::")[2] or report.nodeid
        verdict = {"passed": "inside", "skipped": "not run"}.get(report.outcome, report.outcome)
        self.reported = True
        self._give({"figure": name, "value": round(seconds, 2), "unit": "s", "verdict": verdict, "note": last})


def run(give: Give, *words: str) -> None:
    """Run these tests without this project's pytest settings, because a machine may lack their plugins."""
    try:
        import pytest
    except ImportError:
        return give(not_run(" ".join(words), "pytest is not installed"))
    options = ["-c", os.devnull, f"--rootdir={ROOT}", "--confcutdir", str(ROOT / "tests" / "gpu")]
    options += ["--import-mode=importlib", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    recorder = _Recorder(give)
    code = pytest.main([*options, "--continue-on-collection-errors", *words], plugins=[recorder])
    skipped = code == pytest.ExitCode.NO_TESTS_COLLECTED and recorder.reported  # else nothing has these names
    if code != pytest.ExitCode.OK and not skipped:
        give(
            {"figure": " ".join(words), "verdict": "failed", "note": f"pytest ended with {pytest.ExitCode(code).name}"}
        )
    return None
