"""A checkpoint counts when its manifest says so, and only then."""

from pathlib import Path

from service.checkpoints import MANIFEST, Checkpoints


def written(checkpoints: Checkpoints, step: int) -> int:
    """A checkpoint of two files; returns the oldest step that is kept."""
    path = checkpoints.begin(step)
    (path / "trainer").mkdir()
    (path / "trainer" / "rank_0.safetensors").write_bytes(bytes([step]) * 1000)
    (path / "trainer" / "learner.json").write_text("{}")
    return checkpoints.finish(step, epoch=1, journal_position=64 * step, issued=step, frontier=step)


def test_the_newest_whole_checkpoint_is_found_and_old_ones_are_dropped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() is None

    assert [written(checkpoints, step) for step in (5, 10, 15)] == [5, 5, 10]

    newest = checkpoints.newest()
    assert newest is not None and (newest.step, newest.journal_position) == (15, 960)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_15"]


def test_a_checkpoint_without_its_manifest_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    written(checkpoints, 5)
    (checkpoints.begin(10) / "rank_0.safetensors").write_bytes(b"half")

    newest = checkpoints.newest()
    assert newest is not None and newest.step == 5


def test_a_checkpoint_is_passed_over_when_a_file_or_its_manifest_is_damaged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (5, 10, 15, 20):
        written(checkpoints, step)
    (tmp_path / "step_20" / "trainer" / "learner.json").unlink()
    (tmp_path / "step_15" / "trainer" / "rank_0.safetensors").write_bytes(b"\x0f" * 999 + b"\x10")
    (tmp_path / "step_10" / MANIFEST).write_text('{"step": 10')

    newest = checkpoints.newest()
    assert newest is not None and newest.step == 5


def test_a_step_can_be_asked_for_and_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (5, 10):
        written(checkpoints, step)
    older = checkpoints.newest(at_most=9)
    assert older is not None and older.step == 5

    assert list(checkpoints.begin(10).iterdir()) == []
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 5
