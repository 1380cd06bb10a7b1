"""Uploads go on beside the run, and what the store holds is whole or does not count."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from service.backoff import Backoff
from service.errors import RunFailed, UserError
from service.run.folder import STORE_MARK, UPLOADS
from service.store import uploads as uploading
from service.store.contents import REACHED, RUN, RunMark, StoredCheckpoint, manifest_name, stored_steps
from tests.pure.store.memory import MemoryObjects
from tests.pure.store.scripted import EVERY, STEPS, ScriptedRun, claim, settings
from tests.waiting import until


def run_in(folder: Path, objects: MemoryObjects | None, **changes: object) -> ScriptedRun:
    return ScriptedRun(folder / "runs" / "scripted", settings(folder / "runs", **changes), objects)


def stored(objects: MemoryObjects, step: int) -> StoredCheckpoint:
    """The manifest of a step whose objects are all in the store."""
    mark = RunMark.read(objects, objects.sizes())
    assert mark is not None
    return StoredCheckpoint.read(objects, step, mark.run, objects.sizes())


def test_the_store_holds_as_many_checkpoints_as_the_disk_and_how_the_run_ended(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train()
    run.end()

    assert stored_steps(objects.sizes()) == sorted(run.checkpoints.steps(), reverse=True) == [6, 4]
    assert objects.held["final/model.safetensors"] == (run.folder / "final" / "model.safetensors").read_bytes()
    assert objects.puts[-1] == "summary.json"
    needed = {name for step in (4, 6) for name in stored(objects, step).objects}
    assert {name for name in objects.held if name.startswith("files/")} == needed
    assert not (run.folder / UPLOADS).exists()


def test_a_segment_of_the_journal_that_two_checkpoints_need_is_uploaded_once(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train()
    older, newer = (stored(objects, step).objects for step in (4, 6))
    both = {name for name in older.keys() & newer.keys() if "/journal/" in name}
    assert both
    assert all(objects.puts.count(name) == 1 for name in both)


def test_an_upload_that_fails_is_repeated_and_said_once_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "BACKOFF", Backoff(0.001, 0.001))
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    failures = 5

    def fails(doing: str, name: str) -> bool:
        return doing == "cut" and run.uploads.status.failures < failures

    objects.fails = fails
    run.train(EVERY)
    until(lambda: run.uploads.status.step == EVERY, 10)
    assert run.uploads.status._replace(bytes=0) == (EVERY, 0, failures, "")
    assert [line.partition(":")[0] for line in run.said] == [
        f"the checkpoint of step {EVERY} is not uploaded",
        "memory",  # the address: uploads succeed again
    ]


def test_an_upload_that_stores_a_file_with_each_attempt_is_tried_again_after_the_shortest_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses_after = list[int]()
    others = set(threading.enumerate())  # the uploads of an earlier test may still be tried again

    class Pauses(Backoff):
        def pause(self, failures: int) -> float:
            if threading.current_thread() not in others:
                pauses_after.append(failures)
            return 0.001

    monkeypatch.setattr(uploading, "BACKOFF", Pauses(1.0))
    objects, failed = MemoryObjects(), set[str]()
    run = run_in(tmp_path, objects)

    def fails(doing: str, name: str) -> bool:
        """Every object is refused once."""
        is_first = doing == "put" and name not in failed
        failed.add(name)
        return is_first

    objects.fails = fails
    run.train(EVERY)
    until(lambda: run.uploads.status.step == EVERY, 20)
    assert len(pauses_after) > 3 and {*pauses_after} == {1}, pauses_after


def test_training_never_waits_for_the_store_and_a_newer_checkpoint_takes_the_place_of_one_that_waits(
    tmp_path: Path,
) -> None:
    objects, under_way, goes_on = MemoryObjects(), threading.Event(), threading.Event()
    run = run_in(tmp_path, objects)

    def fails(doing: str, name: str) -> bool:
        if doing == "put":
            under_way.set()
            return not goes_on.wait(60)
        return False

    objects.fails, run.settles = fails, lambda: None
    run.train(EVERY)
    assert under_way.wait(60)
    run.train()
    assert run.step == STEPS
    assert len(list((run.folder / UPLOADS).iterdir())) == 2  # one under way, one that waits
    goes_on.set()
    until(lambda: not run.uploads.left(), 10)
    assert stored_steps(objects.sizes())[0] == STEPS // EVERY * EVERY


def test_a_run_whose_store_is_silent_ends_after_its_deadline_and_names_what_only_the_disk_has(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train(2)
    objects.fails = lambda doing, name: True
    with pytest.raises(RunFailed, match=r"lacks the final weights, which only .*/scripted has now: .* failed"):
        run.end()


@pytest.mark.parametrize("refused", ["cut", "done"])
def test_a_run_gives_up_a_store_that_reads_every_byte_and_stores_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(uploading, "BACKOFF", Backoff(0.01, 0.01))
    objects = MemoryObjects()
    run = run_in(tmp_path, objects, store_deadline=1)
    run.train(2)
    before = run.uploads.status.bytes
    objects.fails = lambda doing, name: doing == refused
    with pytest.raises(RunFailed, match=r"lacks the final weights, .* failed"):
        run.end()
    assert run.uploads.status.failures > 10
    size = sum(
        path.stat().st_size for name in ("final", "metrics.jsonl", "summary.json") for path in files_in(run, name)
    )
    assert run.uploads.status.bytes - before <= size, "bytes of repeated attempts are not counted"


def files_in(run: ScriptedRun, name: str) -> list[Path]:
    return [path for path in ((run.folder / name), *(run.folder / name).rglob("*")) if path.is_file()]


def test_a_note_of_progress_does_not_hide_a_checkpoint_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploading, "BACKOFF", Backoff(0.001, 0.001))
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    noted = threading.Event()

    def fails(doing: str, name: str) -> bool:
        if doing == "done" and name == REACHED:
            noted.set()
        return doing == "put" and name.startswith("files/")

    objects.fails = fails
    run.train(EVERY)
    run.uploads.reached(EVERY, 0)
    assert noted.wait(20)
    before = run.uploads.status.failures
    until(lambda: run.uploads.status.failures > before + 2, 20)
    assert run.uploads.status.failing and len(run.said) == 1, run.said


def damage_checkpoints_of(run: ScriptedRun) -> None:
    """Each checkpoint's weights get other bytes once the checkpoint is durable."""
    finish = run.checkpoints.finish

    def damaged(*arguments: int) -> int:
        oldest = finish(*arguments)
        next(run.checkpoints.path(arguments[0]).rglob("*.safetensors")).write_bytes(b"12345678")
        return oldest

    run.checkpoints.finish = damaged  # type: ignore[method-assign]


def test_a_damaged_file_is_never_part_of_a_checkpoint_in_the_store(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    damage_checkpoints_of(run)
    run.train(2)
    assert "its disk is damaged" in run.uploads.status.failing
    assert stored_steps(objects.sizes()) == [0]


def test_a_mark_that_another_hand_overwrites_costs_the_uploads_and_not_the_run(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train(EVERY)
    mark, objects.held[RUN] = objects.held[RUN], b"{}"
    run.train(2 * EVERY)
    assert "its run.json is not of a run" in run.uploads.status.failing
    objects.held[RUN] = mark
    until(lambda: run.uploads.status.step == 2 * EVERY, 10)


def test_a_store_that_lets_nothing_be_deleted_has_each_checkpoint_and_says_what_is_left_over(tmp_path: Path) -> None:
    objects = MemoryObjects()
    objects.fails = lambda doing, name: doing == "delete"
    run = run_in(tmp_path, objects)
    run.train()
    assert run.uploads.status.step == stored_steps(objects.sizes())[0] == 6
    assert run.uploads.status.failures and not run.uploads.status.failing
    assert [line.partition(":")[0] for line in run.said] == ["what is too old is not deleted"]
    run.end()
    assert "summary.json" in objects.held


def test_a_file_that_another_process_deletes_from_under_an_upload_is_uploaded_again(tmp_path: Path) -> None:
    """The older process of two lists what it may delete, and stands still before it does."""
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    taken = list[str]()

    def take(doing: str, name: str) -> bool:
        if doing == "put" and name == manifest_name(EVERY) and not taken:
            taken.extend(name for name in objects.held if "/trainer/" in name and "step_2/" in name)
            del objects.held[taken[0]]
        return False

    objects.fails = take
    run.train(EVERY)
    until(lambda: run.uploads.status.step == EVERY, 10)
    assert taken and stored(objects, EVERY)


def test_an_older_process_deletes_nothing_once_a_newer_one_has_the_store(tmp_path: Path) -> None:
    objects = MemoryObjects()
    older = run_in(tmp_path, objects)
    sizes = objects.sizes

    def taken_over_meanwhile() -> dict[str, int]:
        if manifest_name(EVERY) in objects.held:
            objects.held[RUN] = RunMark(run="1" * 32, owner="2").model_dump_json().encode()
            objects.held["files/of-the-newer-one"] = b"x"
        return sizes()

    objects.sizes = taken_over_meanwhile  # type: ignore[method-assign]
    older.train(EVERY)
    until(lambda: not older.uploads.left(), 10)
    assert "files/of-the-newer-one" in objects.held


def test_a_file_whose_bytes_changed_on_their_way_is_not_left_in_the_store(tmp_path: Path) -> None:
    """A later process would take it, by its name and size, for what it has to upload itself."""
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    damage_checkpoints_of(run)
    run.train(EVERY)
    assert not [name for name, data in objects.held.items() if data == b"12345678"]


def test_links_of_a_checkpoint_that_cannot_be_uploaded_are_not_left_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path, MemoryObjects())
    link, full = os.link, OSError(errno.ENOSPC, "No space left on device", "link")

    def linked(source: Path, target: Path) -> None:
        if "checkpoints" in Path(source).parts:
            raise full
        link(source, target)

    monkeypatch.setattr(os, "link", linked)
    run.settles = lambda: None
    run.train(EVERY)
    assert "No space left on device" in run.uploads.status.failing
    assert not [file for file in (run.folder / UPLOADS).rglob("*") if file.is_file()]


def test_a_store_belongs_to_one_run(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run_in(tmp_path, objects).train(2)
    with pytest.raises(UserError, match=r"holds another run; give another place, or go on with that run: baton run"):
        run_in(tmp_path / "other", objects)
    with pytest.raises(UserError, match=r"holds other files \(a/b, ...\) and no run; give an empty place"):
        run_in(tmp_path / "other", MemoryObjects({"a/b": b""}))
    with pytest.raises(UserError, match=r"its run.json is not of a run"):
        run_in(tmp_path / "other", MemoryObjects({"run.json": b"{}"}))


def test_a_store_without_any_checkpoint_can_be_used_by_another_run(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run_in(tmp_path, None).train(0)
    claim(objects, settings(tmp_path), tmp_path / "runs" / "scripted")
    run_in(tmp_path / "other", objects).train(2)
    assert stored_steps(objects.sizes()) == [2, 0]


def test_of_two_processes_the_newer_one_uploads_and_the_older_one_says_so_and_trains_on(tmp_path: Path) -> None:
    objects = MemoryObjects()
    older = run_in(tmp_path, objects)
    older.train(2)
    newer = claim(objects, settings(tmp_path), older.folder)
    older.train()
    assert stored_steps(objects.sizes()) == [2, 0]
    assert [line for line in older.said if "was taken over by another process" in line]
    with pytest.raises(RunFailed, match="was taken over by another process"):
        older.end()
    newer.finish()


def test_a_folder_that_is_older_than_the_store_is_refused(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train(2)
    kept = (run.folder / STORE_MARK).read_bytes()
    for _ in range(2):
        claim(objects, settings(tmp_path), run.folder)
    (run.folder / STORE_MARK).write_bytes(kept)
    with pytest.raises(UserError, match="this run went on from memory://bucket/run in another folder since"):
        claim(objects, settings(tmp_path), run.folder)


def test_a_process_that_is_killed_while_it_claims_the_store_does_not_lock_its_run_out(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train(2)
    for moment in ("put", "done"):
        objects.fails = lambda doing, name, moment=moment: doing == moment  # type: ignore[misc]
        with pytest.raises(UserError, match="failed"):
            claim(objects, settings(tmp_path), run.folder)
        objects.fails = lambda doing, name: False
        claim(objects, settings(tmp_path), run.folder).finish()


def test_a_claim_without_an_answer_may_take_effect_after_later_ones(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = run_in(tmp_path, objects)
    run.train(2)
    marks = []
    for _ in range(3):
        claim(objects, settings(tmp_path), run.folder).finish()
        marks.append(objects.held[RUN])
    for late in marks[::-1]:
        objects.held[RUN] = late
        claim(objects, settings(tmp_path), run.folder).finish()
