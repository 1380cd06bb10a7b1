"""Run folders that were made to exhaust whoever looks at them: refused with one line, in bounded memory and time."""

import gzip
import os
import tracemalloc
from importlib import import_module
from pathlib import Path

import pytest

from service.cli.parser import main
from service.run.folder import CONFIG, TIMELINE, TRAJECTORIES, TRAJECTORIES_BYTES
from service.run.records.timeline import FILE_BYTES, FILES, TimelineFiles

PEAK = 8 << 20
"""Bytes that reading a bomb may take; each is smaller, and would take many times as much."""
BOMBS = {
    "compressed": gzip.compress(bytes(64 << 20)) + b"\n",
    "a million lists in an object": b'{"id":[' + b"[]," * 1_000_000 + b"[]]}\n",
    "deep": b"[" * 1_000_000 + b"\n",
    "a number of a million digits": b'{"id":' + b"9" * 1_000_000 + b"}\n",
}


def refused(capsys: pytest.CaptureFixture[str], folder: Path, command: str) -> str:
    """The line with which a command refuses a run folder."""
    assert main([*command.split(), str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("baton: ") and err.count("\n") == 1 and len(err) < 1000
    return err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder that has kept nothing yet."""
    (tmp_path / CONFIG).touch()
    (tmp_path / TIMELINE).mkdir()
    return tmp_path


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("command", ["trace", "trajectories list"])
def test_a_bomb_is_refused_with_one_line_and_little_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, command: str
) -> None:
    (folder / TRAJECTORIES).write_bytes(BOMBS[name])
    writer = TimelineFiles(folder / TIMELINE)
    writer.append(BOMBS[name].removesuffix(b"\n") + b"\n")
    writer.close()
    for name in ("trace.trajectories_command", "run.records.trajectories", "run.records.timeline"):
        import_module(f"service.{name}")  # whose memory is not the reader's
    tracemalloc.start()
    try:
        refused(capsys, folder, command)
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()


def test_files_larger_than_any_run_writes_are_refused_unread(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / TRAJECTORIES).open("wb") as file:
        file.truncate(2 * TRAJECTORIES_BYTES + 1)
    assert f"no run writes more than {2 * TRAJECTORIES_BYTES:,}" in refused(capsys, folder, "trajectories list")
    for number in range(2 * FILES + 1):
        with (folder / TIMELINE / f"{number:06}.jsonl").open("wb") as file:
            file.truncate(FILE_BYTES)
    assert f"no run writes more than {2 * FILES * FILE_BYTES:,}" in refused(capsys, folder, "trace")


@pytest.mark.timeout(30)
def test_what_is_no_file_is_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(folder / TIMELINE / "000001.jsonl")
    (folder / TIMELINE / "000002.jsonl").symlink_to("/dev/zero")
    assert "no timeline" in refused(capsys, folder, "trace")
    (folder / TRAJECTORIES).symlink_to("/dev/zero")
    assert "is a pipe or a device" in refused(capsys, folder, "trajectories list")
