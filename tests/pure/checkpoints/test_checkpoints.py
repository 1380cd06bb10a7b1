"""A checkpoint counts when its manifest says so, and only then."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from service.errors import UserError
from service.run.checkpoints import FORMAT, MANIFEST, Checkpoints, Manifest


def written(checkpoints: Checkpoints, step: int) -> int:
    """A checkpoint of two files; returns the oldest step that is kept."""
    path = checkpoints.begin(step)
    (path / "trainer").mkdir()
    (path / "trainer" / "rank_0.safetensors").write_bytes(bytes([step]) * 1000)
    (path / "trainer" / "learner.json").write_text("{}")
    return checkpoints.finish(step, journal_position=64 * step)


def made(folder: Path, keep: int, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        written(checkpoints, step)
    return checkpoints


def newest(checkpoints: Checkpoints) -> int | None:
    manifest = checkpoints.newest()
    return None if manifest is None else manifest.step


def folders(path: Path) -> list[str]:
    return sorted(folder.name for folder in path.iterdir())


def test_the_newest_whole_checkpoint_is_found_and_old_ones_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None
    assert [written(checkpoints, step) for step in (5, 10, 15)] == [5, 5, 10]

    manifest = checkpoints.newest()
    assert manifest is not None and (manifest.step, manifest.journal_position) == (15, 960)
    assert folders(tmp_path) == ["step_10", "step_15"]


def test_a_checkpoint_is_passed_over_when_a_file_or_its_manifest_is_missing_or_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = made(tmp_path, 9, 5, 10, 15, 20)
    (checkpoints.begin(25) / "rank_0.safetensors").write_bytes(b"half")
    (tmp_path / "step_20" / "trainer" / "learner.json").unlink()
    (tmp_path / "step_15" / "trainer" / "rank_0.safetensors").write_bytes(b"\x0f" * 999 + b"\x10")
    (tmp_path / "step_10" / MANIFEST).write_text('{"step": 10')
    assert newest(checkpoints) == 5
    for line, step, wrong in zip(caplog.messages, (20, 15, 10), ("is missing", "other bytes", "damaged"), strict=True):
        assert f"step_{step}: " in line and wrong in line and line.endswith("that of step 5 is taken")


def change(manifest: Path, **fields: object) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


LONG = {"a" * 5000: {"bytes": 1, "xxh3_64": "0"}}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "step_99").write_text("a file"),
        lambda folder: (folder / "step_99").symlink_to(folder / "step_5"),
        lambda folder: shutil.copytree(folder / "step_5", folder / "step_99"),
        lambda folder: shutil.copytree(folder / "step_5", folder / "step_005"),
        lambda folder: (folder / "step_10").write_text("a file"),
        lambda folder: (folder / "step_10").symlink_to(folder / "step_5"),
        lambda folder: change(written_at(folder, 7) / MANIFEST, files=LONG),
        lambda folder: change(written_at(folder, 7) / MANIFEST, step=6),
        lambda folder: (written_at(folder, 7) / MANIFEST).write_bytes(b""),
    ],
)
def test_what_is_no_checkpoint_hinders_neither_a_resume_nor_the_next_one(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    written(Checkpoints(tmp_path, keep=9), 5)
    spoil(tmp_path)
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert newest(checkpoints) == 5
    checkpoints.drop_unfinished()
    assert written(checkpoints, 10) == 5
    assert newest(checkpoints) == 10 and checkpoints.steps() == [5, 10]


def written_at(folder: Path, step: int) -> Path:
    written(Checkpoints(folder, keep=9), step)
    return folder / f"step_{step}"


def test_unreadable_checkpoints_are_removed_with_those_that_are_too_old(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, 9, 5, 10)
    (tmp_path / "step_5" / MANIFEST).write_bytes(b"\xff")
    (tmp_path / "step_10" / MANIFEST).unlink()
    (tmp_path / "step_10" / MANIFEST).mkdir()
    written(checkpoints, 15)
    assert folders(tmp_path) == ["step_15"]


def test_an_old_checkpoint_that_cannot_be_removed_stays_and_one_of_a_later_step_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = made(tmp_path, 1, 5)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path)) if path.exists() else FileNotFoundError

    monkeypatch.setattr(Path, "unlink", refuse)
    assert written(checkpoints, 10) == 10 == newest(checkpoints)
    assert folders(tmp_path) == ["step_10", "step_5"]
    with pytest.raises(PermissionError, match="step_10"):
        written(checkpoints, 7)


def test_a_checkpoint_of_another_format_is_refused_in_one_line_and_kept(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, 2, 5, 10)
    change(tmp_path / "step_5" / MANIFEST, format=FORMAT + 1, something=3)
    with pytest.raises(UserError, match=rf"step_5: its {MANIFEST} is of format {FORMAT + 1}, [^\n]+$"):
        checkpoints.newest()
    assert folders(tmp_path) == ["step_10", "step_5"]


def test_a_step_can_be_written_anew(tmp_path: Path) -> None:
    checkpoints = made(tmp_path, 9, 5, 10)
    assert list(checkpoints.begin(10).iterdir()) == []
    assert newest(checkpoints) == 5


def damage(folder: Path) -> None:
    file = folder / "trainer" / "rank_0.safetensors"
    before = file.stat()
    file.write_bytes(b"x" * before.st_size)
    # clocks of file systems are coarse
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


@pytest.mark.parametrize("again", [False, True])
def test_damaged_checkpoints_do_not_take_the_place_of_whole_ones(tmp_path: Path, again: bool) -> None:
    """Whether the process that goes on wrote them itself or is another one."""
    checkpoints = made(tmp_path, 2, 5, 10)
    damage(tmp_path / "step_10")
    if again:
        checkpoints = Checkpoints(tmp_path, keep=2)
    assert written(checkpoints, 15) == 5
    assert folders(tmp_path) == ["step_15", "step_5"]


def test_a_run_that_went_back_behind_a_damaged_checkpoint_keeps_what_it_writes(tmp_path: Path) -> None:
    written(Checkpoints(tmp_path, keep=1), 10)
    damage(tmp_path / "step_10")
    resumed = Checkpoints(tmp_path, keep=1)
    assert [written(resumed, step) for step in (6, 7)] == [6, 7]
    assert newest(resumed) == 7
    assert folders(tmp_path) == ["step_7"]


def test_what_killed_runs_left_unfinished_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    written(checkpoints, 5)
    for step in (3, 21):
        (checkpoints.begin(step) / "rank_0.safetensors").write_bytes(b"half")
    (tmp_path / "step_by_step").mkdir()
    written(checkpoints, 10)
    assert folders(tmp_path) == ["step_10", "step_5", "step_by_step"]
    checkpoints.begin(15)
    Checkpoints(tmp_path, keep=2).drop_unfinished()
    assert folders(tmp_path) == ["step_10", "step_5", "step_by_step"]


def test_a_journal_that_lost_its_end_or_is_another_ones_is_refused_in_one_line(tmp_path: Path) -> None:
    manifest = Manifest(step=4, journal_position=640, files={})
    manifest.check_journal(640, tmp_path)
    for position in (0, 639):
        with pytest.raises(UserError, match=rf"ends at position {position}, .*step 4 .* 640") as refused:
            manifest.check_journal(position, tmp_path)
        assert "\n" not in str(refused.value) and str(tmp_path) in str(refused.value)
