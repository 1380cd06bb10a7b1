"""`baton logs` prints what the parts of a run print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli.parser import main
from service.run.folder import CONFIG, DRIVER_LOG, LOGS, SUMMARY
from service.run.records.log_file import log_into
from tests.pure.conftest import Refused


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / CONFIG).touch()
    logs = tmp_path / LOGS
    logs.mkdir()
    (logs / "buffer.log").write_text("2026-01-01T00:00:02.000Z second\n2026-01-01T00:00:04.000Z fourth\n")
    (logs / "driver.log").write_text("2026-01-01T00:00:01.000Z first\n2026-01-01T00:00:03.000Z third\n")
    (logs / "trainer-0.log").touch()
    return tmp_path


def test_the_newest_lines_of_all_parts_come_in_the_order_of_their_times(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", str(run), "--last", "3"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(part, word) for part, _, word in shown] == [
        ("buffer", "second"),
        ("driver", "third"),
        ("buffer", "fourth"),
    ]

    assert main(["logs", str(run), "driver"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["first", "third"]


def test_following_a_run_that_has_ended_prints_its_lines_and_ends(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / SUMMARY).touch()
    assert main(["logs", str(run), "--follow", "--last", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["the run has ended: no more lines will come"]


@pytest.mark.parametrize("more", [[], ["--follow"]])
def test_lines_that_find_no_room_or_no_reader_are_not_lost_in_silence(run: Path, more: list[str]) -> None:
    command = [sys.executable, "-m", "service", "logs", str(run), *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 2 and done.stderr == "baton: output: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    assert subprocess.run(command, stdout=writing, timeout=240).returncode == 1
    os.close(writing)


def test_a_part_that_is_not_there_is_one_line_with_those_that_are(run: Path, refused: Refused) -> None:
    assert "it has buffer, driver, trainer-0" in refused("logs", run, "generator-7")


def test_a_log_larger_than_a_run_writes_is_refused_unread(run: Path, refused: Refused) -> None:
    os.truncate(run / LOGS / "buffer.log", 4 << 30)
    assert "but no run writes more than" in refused("logs", run)


def test_following_goes_on_with_lines_of_every_part_also_after_a_log_was_renamed(run: Path) -> None:
    command = [sys.executable, "-m", "service", "logs", str(run), "--follow"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert following.stdout is not None
    lines = iter(following.stdout)
    try:
        assert [next(lines).split()[2] for _ in range(4)] == ["second", "fourth", "first", "third"]
        with (run / LOGS / "trainer-0.log").open("a") as file:
            file.write("2026-01-01T00:00:05.000Z fifth\n")
        assert next(lines).split() == ["trainer-0", "2026-01-01T00:00:05.000Z", "fifth"]
        (run / LOGS / "buffer.log").rename(run / LOGS / "buffer.log.1")
        (run / LOGS / "buffer.log").write_text("2026-01-01T00:00:06.000Z sixth\n")
        assert next(lines).split()[::2] == ["buffer", "sixth"]
    finally:
        following.terminate()
        following.wait(timeout=60)
        following.stdout.close()


def test_the_drivers_log_has_what_is_said_and_how_the_run_failed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from service.run.phases import say

    file = run / LOGS / DRIVER_LOG
    with pytest.raises(ZeroDivisionError), log_into(file):
        say("step 1")
        _ = 1 // 0
    log = file.read_text()
    assert "INFO baton: step 1\n" in log
    assert "Traceback" in log and "ZeroDivisionError" in log
    assert capsys.readouterr().out == "step 1\n"
