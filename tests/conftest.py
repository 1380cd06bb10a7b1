"""What every test session has: one Ray at most, and no process of its own left behind.

Ray's own fixture is in `tests/e2e/conftest.py`; nothing here imports Ray, so that the pure tests need none.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.slowest import SlowestFiles

MARK = "BATON_TEST_SESSION"
"""Environment variable that every process of a test session inherits."""

GONE_SECONDS = 60.0

# The same examples everywhere, and no clock: what fails, fails each time and not only on a machine that is slow today.
settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# Other examples each time, as `make test-full` has them.
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The list of the slowest test files, which `make test` makes."""
    parser.addoption("--slowest", type=Path, help="write the seconds of each test file that takes a second or more")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported: Ray reads its settings from the environment when it is imported."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        os.environ.pop(name, None)
    # A token of the session's own: Ray need not write one into the home of whoever runs the tests.
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray's workers have a low priority, behind the tests that run beside them; and Ray starts workers that no run uses.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    os.environ["MPLBACKEND"] = "agg"
    _let_children_have_signals()
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(4)}"

    if (file := config.getoption("--slowest")) is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SlowestFiles(file))


def _let_children_have_signals() -> None:
    """Ignore by a handler what the shell made this process ignore (`nohup make test &`).

    A child inherits that a signal is ignored, but not a handler: its default is restored when it starts.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def processes_with(name: str, value: str) -> dict[int, str]:
    """Living processes whose environment says `name=value`, with their command lines; not this one."""
    wanted = f"{name}={value}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:160]
    return found


def wait_until_gone(name: str, value: str, seconds: float) -> dict[int, str]:
    """What is still there of `processes_with` when none is left or the time is up."""
    deadline = time.monotonic() + seconds
    while (left := processes_with(name, value)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="session")
def left_over() -> Callable[[str, str, float], dict[int, str]]:
    """`wait_until_gone`, for tests that start processes of their own."""
    return wait_until_gone


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """Fails the session, at its end, for a process that a test started and nobody ended."""
    yield
    left = wait_until_gone(MARK, os.environ[MARK], GONE_SECONDS)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert left == {}, "processes outlived the tests that started them"
