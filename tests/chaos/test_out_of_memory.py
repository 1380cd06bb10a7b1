"""The kernel ends processes of a real run for want of memory: each death is named as that, with what to change."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from service.run.liveness.host_memory import REMEDIES
from tests.chaos.real_pairs import MORE_STEPS, START_SECONDS, PairRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

LIMIT = 1 << 20
"""Bytes that a process may still take; what it has taken before does not count."""
TOLD_SECONDS = 5.0
VICTIMS = {"trainer-0": "trainer", "generator-0": "generator", "engine": "generator", "buffer": "buffer"}
"""With the part whose settings need the memory."""


@pytest.fixture
def narrow() -> Iterator[Callable[[int], None]]:
    """Moves a process into a control group with little memory, of either version of the kernel's interface."""
    first = Path("/sys/fs/cgroup/memory")
    at, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    group = at / f"baton-{uuid4().hex}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group of memory can be made here: {error}")
    yield lambda pid: (group / "cgroup.procs").write_text(str(pid)) and None
    deadline = time.monotonic() + 30
    while (group / "cgroup.procs").read_text():
        assert time.monotonic() < deadline, "a process is still in the group"
        time.sleep(0.1)
    group.rmdir()


def test_processes_that_the_kernel_ends_are_named_as_out_of_memory_with_what_to_change(
    started: Callable[[], PairRun], narrow: Callable[[int], None]
) -> None:
    run = started()
    for victim, part in VICTIMS.items():
        goal = run.step() + MORE_STEPS
        run.until(lambda goal=goal: run.step() >= goal, START_SECONDS, f"step {goal}")  # type: ignore[misc]
        pid, known = run.pid(victim), len(run.told.said)
        narrow(pid)
        run.until(lambda pid=pid, victim=victim: run.pid(victim) != pid, 60, f"the death of {victim}")  # type: ignore[misc]
        died = run.now()
        told = lambda known=known: [each for each in run.told.said[known:] if "out of memory" in each[1]]  # noqa: E731
        run.until(told, 60, f"a line about {victim}")
        at, line = told()[0]
        print(f"{victim}: {line!r}, {at - died:.1f} s after its death")
        assert REMEDIES[part] in line and at - died < TOLD_SECONDS
