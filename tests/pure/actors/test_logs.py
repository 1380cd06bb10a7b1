"""What a part of a run prints lies in its log while it runs, however the part ends."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from actors.driver.evaluate_model import logs_kept_on_failure
from actors.observe.actor_logs import log_env
from service.errors import RunFailed
from service.run.records.log_file import LOG_BYTES, OLDER_FILES
from tests.waiting import until

PART = "generator-0"
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
BEGINNING = f"""
import logging, os, signal, subprocess, sys
from actors.observe.actor_logs import keep_log
keep_log("{PART}")
"""


def play(code: str, logs: Path | dict[str, str], output: int | None = subprocess.DEVNULL) -> int:
    """Run a part of which `logs` keeps the output, or with these variables; returns how its process ended."""
    environment = os.environ | (log_env(logs) if isinstance(logs, Path) else logs)
    return subprocess.run([sys.executable, "-c", BEGINNING + code], env=environment, stdout=output).returncode


def lines_of(file: Path, last: str) -> list[str]:
    """The lines of a log without their times, once the last one is there."""

    def look() -> list[str]:
        with contextlib.suppress(FileNotFoundError):  # just renamed, and the next one is not there yet
            if last in (text := file.read_text()):
                return text.splitlines()
        return []

    lines = until(look, said=lambda: sorted(file.parent.iterdir()))
    assert all(TIME.match(line) for line in lines)
    return [TIME.sub("", line, count=1) for line in lines]


def test_a_log_has_the_output_of_a_killed_part_of_its_children_and_of_libraries(tmp_path: Path) -> None:
    play(
        """
print("an environment prints")
print("INFO 11-28 [block_pool.py:861] Successfully reset prefix cache")
sys.stderr.write("10 %\\r20 %\\n")
logging.getLogger("some.library").warning("a message")
subprocess.run(["printf", "a child, \\033[31mred\\n"])
os.write(1, b"the last word\\n")
os.kill(os.getpid(), signal.SIGKILL)
""",
        tmp_path,
    )
    first, *lines = lines_of(tmp_path / f"{PART}.log", "the last word")
    assert first.startswith(f"{PART} begins: process ")
    assert lines == [
        "an environment prints",
        "20 %",
        "WARNING some.library: a message",
        r"a child, \x1b[31mred",
        "the last word",
    ]


def test_a_log_goes_on_after_a_restart_and_stays_within_its_bound(tmp_path: Path) -> None:
    lines = (OLDER_FILES + 2) * LOG_BYTES // 60_000
    play("print('the first life')", tmp_path)
    play(f"for _ in range({lines}): print('x' * 60_000)\nprint('the last word')", tmp_path)
    assert lines_of(tmp_path / f"{PART}.log", "the last word")
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + OLDER_FILES
    assert sum(file.stat().st_size for file in files) <= len(files) * LOG_BYTES


def test_a_log_that_cannot_be_written_leaves_the_output_where_it_was(tmp_path: Path) -> None:
    (tmp_path / f"{PART}.log").mkdir()
    with (tmp_path / "output").open("wb") as output:
        assert play("print('goes on')", tmp_path, output.fileno()) == 0
    assert (tmp_path / "output").read_text() == "goes on\n"


def test_on_a_host_without_the_run_folder_the_output_stays_in_rays_log(tmp_path: Path) -> None:
    logs, ray, other = tmp_path / "quickstart" / "logs", tmp_path / "worker.out", tmp_path / "moved"
    logs.mkdir(parents=True)
    named = log_env(logs)
    logs.rename(other)
    logs.mkdir()  # another folder of the same name, as on another host
    with ray.open("wb") as output:
        assert play("print('a word')", named, output.fileno()) == 0
    assert ray.read_text() == "a word\n" and not [*logs.iterdir()]


@pytest.mark.parametrize(("error", "stays"), [(None, False), (SystemExit(143), False), (RunFailed("dead"), True)])
def test_the_logs_of_an_evaluation_stay_where_it_failed(
    error: BaseException | None, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    with contextlib.suppress(RunFailed, SystemExit), logs_kept_on_failure(said.append) as logs:
        (logs / "engine-0.log").write_text("why")
        if error is not None:
            raise error
    assert (logs / "engine-0.log").exists() is stays
    assert [str(logs) in line for line in said] == [True] * stays
    with contextlib.suppress(RunFailed), logs_kept_on_failure(said.append) as logs:
        raise RunFailed("Ray did not start")
    assert not logs.exists() and len(said) == stays, "before an engine began"
