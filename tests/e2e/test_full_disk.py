"""A real run whose disk another process fills: it ends with one line, and goes on once there is room."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import QUICK, Drive, Driver
from tests.e2e.verdict import judged

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

PIECE = 1 << 20
LITTLE = 512 << 10
"""Bytes of room for lines, but neither for a checkpoint nor for final weights."""
STEPS = 13
SETTINGS = [*QUICK, f"run.max_steps={STEPS}", "trainer.checkpoint_every=4"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 MiB, in the place of the folder of runs."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=10).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=10)


@contextmanager
def full(disk: Path, but: int = 0) -> Iterator[None]:
    """Take all the room of the disk but so many bytes, and what becomes free meanwhile; give it back at the end."""
    over, ballast = threading.Event(), disk / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as file:
            while not over.wait(0.01):
                while (free := shutil.disk_usage(disk).free - but) > 0:
                    with suppress(OSError):  # the run was quicker
                        file.write(bytes(min(free, PIECE)))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)
        ballast.unlink()


def ended(run: Driver, disk: Path) -> None:
    """The run ends by itself, with one line that says that the disk is full, and where."""
    assert run.end() == 1, run.tail()
    (line,) = [line for line in run.said if line.startswith("baton: ")]
    assert "No space left on device" in line and str(disk) in line and "Traceback" not in run.tail(), run.tail()


def test_a_run_on_a_disk_that_fills_at_each_phase_ends_with_a_line_and_goes_on_with_room(
    disk: Path, drive: Drive
) -> None:
    with full(disk):
        ended(drive([*SETTINGS, "run.name=never"]), disk)

    run = drive(SETTINGS)
    run.until_true((run.folder / "checkpoints" / "step_4" / "manifest.json").exists)
    with full(disk):
        ended(run, disk)

    again = ["--resume", str(run.folder)]
    run = drive(again)
    run.until("starting the actors")
    with full(disk):
        ended(run, disk)

    run = drive(again)
    run.until("training: steps")
    with full(disk, but=LITTLE):
        ended(run, disk)
    assert any("restarts from step " in line for line in run.said), "a checkpoint fails like a trainer"

    run = drive([*again, "trainer.checkpoint_every=1000"])
    run.until("training: steps")
    with full(disk, but=LITTLE):
        ended(run, disk)
    assert any("writing the final weights" in line for line in run.said)

    run = drive(again)
    run.finish()
    judged(run.folder, STEPS)
    assert run.summary()["state"] == "finished"
