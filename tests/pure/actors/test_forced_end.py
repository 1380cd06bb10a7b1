"""The forced end of a run, `run.stop_grace` seconds after the stop signal."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.config import Config
from service.run.folder import SUMMARY

FORCED = """
import sys, threading
from functools import partial
from pathlib import Path
from actors.driver.run import end_by_force
from actors.driver.signals import force_after
from service.run.writer import RunWriter

folder = RunWriter(Path(sys.argv[1]))

def fails(*_):
    raise OSError(28, "No space left on device")

if sys.argv[2] == "full":
    folder.write_summary = fails
with force_after(0.1, partial(end_by_force, folder, 0.1)) as start:
    start(15)
    threading.Event().wait(60)
"""


@pytest.mark.parametrize("disk", ["full", "free"])
def test_a_run_is_ended_by_force_also_where_its_folder_cannot_be_written(tmp_path: Path, disk: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORCED, str(tmp_path), disk], capture_output=True, timeout=240)
    assert done.returncode == 128 + 15, done.stderr
    assert (tmp_path / SUMMARY).exists() == (disk == "free")


def test_seconds_that_no_timer_can_hold_are_refused() -> None:
    with pytest.raises(ValidationError, match="stop_grace"):
        Config.model_validate({"run": {"stop_grace": 1e12}})
