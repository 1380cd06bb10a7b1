"""The seconds of each test file: `make test` writes them, and the copy in `tests/slowest.txt` tells slow files."""

from collections import defaultdict
from pathlib import Path

import pytest

COMMITTED = Path(__file__).with_suffix(".txt")
SLOW_SECONDS = 6.0
"""`make test-fast` leaves out the files of `tests/pure` that take longer."""
LISTED_SECONDS = 1.0


def read_seconds(file: Path) -> dict[str, float]:
    """Return {test file: seconds} of a list; an absent file is an empty list."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: float(seconds) for seconds, name in map(str.split, lines)}


class SlowestFiles:
    """A pytest plugin that lists the seconds of the files of a session."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's setup, call and teardown."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the list, the slowest file first."""
        found = self._seconds
        listed = sorted((name for name in found if found[name] >= LISTED_SECONDS), key=lambda name: -found[name])
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("".join(f"{found[name]:7.1f}  {name}\n" for name in listed))
