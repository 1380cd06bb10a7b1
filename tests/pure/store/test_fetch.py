"""A run goes on from its store on an empty disk as if it had never stopped."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from service.config import Config, load
from service.config.load import Loaded
from service.errors import ConfigError, UserError
from service.handoff.ledger.events import Lost
from service.handoff.ledger.lifecycle import Fate
from service.run import resuming
from service.run.folder import CONFIG, JOURNAL, STORE_MARK, find_run, lock_run
from service.run.resuming import folder_to_resume, resumed
from service.store import fetch
from service.store.contents import (
    REACHED,
    RUN,
    Damaged,
    FolderMark,
    RunMark,
    StoredCheckpoint,
    claimed,
    manifest_name,
    stored_steps,
)
from tests.pure.store.memory import MemoryObjects
from tests.pure.store.scripted import STEPS, ScriptedRun, settings
from tests.waiting import until


def begun(folder: Path, objects: MemoryObjects | None, steps: int = STEPS) -> ScriptedRun:
    """A run that has taken some steps and was killed then."""
    run = ScriptedRun(folder / "runs" / "scripted", settings(folder / "runs"), objects)
    run.train(steps)
    return run


def gone_on(disk: Path, objects: MemoryObjects, said: list[str] | None = None, steps: int = STEPS) -> ScriptedRun:
    """The run, resumed from the store on another disk."""

    def loaded(file: Path) -> Config:
        return load([file], [f"run.dir={disk / 'runs'}"]).config

    folder = fetch.fetched(objects, loaded, (said if said is not None else []).append)
    config = loaded(folder / CONFIG)
    with resumed(config.run, config.trainer, folder) as manifest:
        run = ScriptedRun(folder, config, objects, manifest)
    run.train(steps)
    return run


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the run that nothing interrupts."""
    return begun(tmp_path_factory.mktemp("whole"), None).history()


def test_a_run_goes_on_on_an_empty_disk_with_the_history_of_the_uninterrupted_one(
    tmp_path: Path, history: list[str]
) -> None:
    objects, said = MemoryObjects(), list[str]()
    begun(tmp_path / "first", objects, 5)
    run = gone_on(tmp_path / "second", objects, said)
    assert run.history() == history
    assert said[0].startswith("reading the checkpoint of step 4 from memory://bucket/run: ")
    assert said[1:] == ["if the run did more after step 4, the store has no count of it; it is generated again"]
    run.end()
    assert stored_steps(objects.sizes()) == [6, 4]
    assert gone_on(tmp_path / "third", objects).history() == history  # from what the second process uploaded


@pytest.mark.parametrize("stride", [19, pytest.param(1, marks=pytest.mark.full)])
def test_killed_at_any_moment_of_any_upload_a_run_goes_on_with_the_same_history(
    tmp_path: Path, history: list[str], stride: int
) -> None:
    moments = 0
    for dies_at in count(0, stride):
        objects, disk, asked = MemoryObjects(), tmp_path / str(dies_at), 0

        def dead(doing: str, name: str) -> bool:
            nonlocal asked
            asked += doing != "get"
            return asked > dies_at  # noqa: B023 - is called in this round only

        run = ScriptedRun(disk / "first" / "runs" / "scripted", settings(disk / "first" / "runs"), objects)
        objects.fails = dead
        run.train(5)
        if asked <= dies_at:
            break
        moments += 1
        assert gone_on(disk / "second", MemoryObjects(dict(objects.held))).history() == history
    assert moments > 50 // stride  # two checkpoints, each with its files at three moments, and what is deleted


def test_what_was_accepted_after_the_checkpoint_counts_as_rolled_back_once(tmp_path: Path) -> None:
    objects, said = MemoryObjects(), list[str]()
    killed = begun(tmp_path / "first", objects, 5)
    accepted = killed.world.buffer.status().accepted_tokens
    killed.uploads.reached(5, accepted)
    until(lambda: REACHED in objects.held, 10)
    run = gone_on(tmp_path / "second", objects, said)
    lost = FolderMark.read(run.folder)
    assert lost is not None and lost.lost is not None and lost.lost[1] > 0
    assert said[-1] == (
        f"the run had come to step 5 at least: 1 optimizer steps and {lost.lost[1]} accepted tokens after step 4 "
        "count as rolled back, and are generated again"
    )
    ledger = run.world.buffer.ledger.state
    assert ledger.fates[Fate.ROLLED_BACK] == lost.lost[1]
    assert ledger.accepted == sum(ledger.fates.values()) > accepted
    run.world.buffer.resume(Lost(*lost.lost))
    assert ledger.fates[Fate.ROLLED_BACK] == lost.lost[1]


Spoil = Callable[[MemoryObjects], object]


def replace(objects: MemoryObjects, name: str, data: bytes) -> None:
    objects.held[name] = data


def rewritten(objects: MemoryObjects, step: int, change: Callable[[dict[str, object]], object]) -> None:
    manifest = json.loads(objects.held[manifest_name(step)])
    change(manifest)
    objects.held[manifest_name(step)] = json.dumps(manifest).encode()


def weights(objects: MemoryObjects) -> str:
    return next(name for name in objects.held if name.startswith("files/checkpoints/step_4/trainer/rank_0"))


SPOILT: dict[str, Spoil] = {
    "is missing": lambda objects: objects.held.pop(weights(objects)),
    "has another size than was written": lambda objects: replace(objects, weights(objects), b"short"),
    "has other bytes than were written": lambda objects: replace(objects, weights(objects), b"12345678"),
    "is damaged (its checksum is another one)": lambda objects: rewritten(
        objects, 4, lambda manifest: manifest.update(accepted_tokens=1)
    ),
    "is damaged (Invalid JSON": lambda objects: replace(objects, manifest_name(4), b"{"),
    "is no path in the run folder": lambda objects: rewritten(
        objects,
        4,
        lambda manifest: manifest["files"].update({"../../x": {"object": "x", "bytes": 1, "xxh3_64": "0"}}),  # type: ignore[attr-defined]
    ),
}


@pytest.mark.parametrize("why", SPOILT)
def test_a_damaged_checkpoint_is_passed_over_and_without_another_one_refused(
    tmp_path: Path, history: list[str], why: str
) -> None:
    objects, said = MemoryObjects(), list[str]()
    begun(tmp_path / "first", objects, 5)
    SPOILT[why](objects)
    assert gone_on(tmp_path / "second", MemoryObjects(dict(objects.held)), said).history() == history
    assert [line for line in said if line.startswith("the checkpoint of step 4 in ") and why in line]
    del objects.held[manifest_name(2)]
    with pytest.raises(UserError) as refused:
        gone_on(tmp_path / "third", objects)
    assert "every checkpoint is damaged (step 4: " in str(refused.value) and why in str(refused.value)
    assert not list((tmp_path / "third" / "runs").glob("*")), "a part of a run is left"


def test_bytes_that_change_on_the_way_are_read_again(tmp_path: Path, history: list[str]) -> None:
    objects, said, reads = MemoryObjects(), list[str](), Counter[str]()
    begun(tmp_path / "first", objects, 5)

    class Flipping(MemoryObjects):
        def get(self, name: str) -> Iterator[bytes]:
            reads[name] += 1
            whole = b"".join(super().get(name))
            yield (
                whole
                if reads[name] >= fetch.READS or not name.startswith("files/")
                else bytes([whole[0] ^ 1]) + whole[1:]
            )

    assert gone_on(tmp_path / "second", Flipping(dict(objects.held)), said).history() == history
    assert not [line for line in said if "passed over" in line]
    assert min(count for name, count in reads.items() if name.startswith("files/")) == fetch.READS


def test_a_run_that_ended_before_its_first_checkpoint_was_uploaded_is_refused(tmp_path: Path) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 0)
    del objects.held[manifest_name(0)]
    with pytest.raises(
        UserError, match="holds no whole checkpoint: the run ended before its first one; begin a new run"
    ):
        gone_on(tmp_path / "second", objects)


def test_a_store_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="memory://bucket/run holds no run"):
        gone_on(tmp_path, MemoryObjects())
    objects = MemoryObjects()
    begun(tmp_path, objects, 0)
    del objects.held[RUN]
    with pytest.raises(UserError, match="holds no run; look for checkpoints/ in the store"):
        gone_on(tmp_path / "second", objects)
    objects.url, objects.held[CONFIG] = f"file://{tmp_path}/runs/scripted", b""
    with pytest.raises(UserError, match="scripted holds no run; it is a run's folder: give its path"):
        gone_on(tmp_path / "second", objects)


@pytest.mark.parametrize("run", ["x/../../victim", "..", "a\0b", "", "0" * 31, "0" * 32 + "\n"])
def test_a_store_whose_run_id_is_none_reaches_no_other_folder(tmp_path: Path, run: str) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 0)
    victim = tmp_path / "second" / "victim"
    victim.mkdir(parents=True)
    objects.held[RUN] = json.dumps({"format": 1, "run": run, "owner": "o"}).encode()
    with pytest.raises(UserError, match=r"its run\.json is not of a run"):
        gone_on(tmp_path / "second", objects)
    rewritten(objects, 0, lambda manifest: manifest.update(run=run))
    with pytest.raises(Damaged, match=r"store\.json is damaged"):
        StoredCheckpoint.read(objects, 0, run, objects.sizes())
    assert [*(tmp_path / "second").iterdir()] == [victim]


def test_a_mistake_in_the_stored_configuration_is_named_with_the_store(tmp_path: Path) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)

    def loaded_with_a_mistake(file: Path) -> Config:
        file.write_text(file.read_text() + "\nwrong: 1\n")
        return load([file], []).config

    with pytest.raises(ConfigError, match=rf"{objects.url}/{CONFIG}:\d+  wrong: unknown key"):
        fetch.fetched(objects, loaded_with_a_mistake, list[str]().append)


def test_where_the_disk_is_as_new_as_the_store_the_run_goes_on_there(tmp_path: Path, history: list[str]) -> None:
    objects, said = MemoryObjects(), list[str]()
    killed = begun(tmp_path, objects, 5)
    run = gone_on(tmp_path, objects, said)
    assert run.folder == killed.folder
    assert said == [f"{run.folder} is as new as memory://bucket/run: the run goes on there"]
    assert run.history() == history
    elsewhere = gone_on(tmp_path / "second", objects, steps=STEPS + 1)
    back = gone_on(tmp_path, objects, steps=STEPS + 1)
    assert back.folder.name == "scripted-2", "the older folder stays as it was"
    assert back.history() == elsewhere.history()


def test_of_two_processes_that_restore_a_run_to_one_place_the_second_is_refused(
    tmp_path: Path, history: list[str]
) -> None:
    objects, refused = MemoryObjects(), list[str]()
    begun(tmp_path / "first", objects, 5)
    at_once = MemoryObjects(dict(objects.held))

    def second(doing: str, name: str) -> bool:
        if doing == "get" and "step_4/trainer" in name:
            with pytest.raises(UserError) as error:
                gone_on(tmp_path / "second", at_once)
            refused.append(str(error.value))
        return False

    objects.fails = second
    run = gone_on(tmp_path / "second", objects)
    assert run.history() == history
    assert refused and all(": another process restores this run there; " in line for line in refused)
    assert [path.name for path in (tmp_path / "second" / "runs").iterdir()] == ["scripted"]


def test_a_run_whose_restorer_was_killed_before_its_last_file_is_restored_again(
    tmp_path: Path, history: list[str]
) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)
    killed = gone_on(tmp_path / "second", MemoryObjects(dict(objects.held)), steps=4)
    (killed.folder / CONFIG).unlink()
    mark = RunMark.read(objects, objects.sizes())
    assert mark is not None
    left = tmp_path / "second" / "runs" / f".partial.{mark.run}"
    (left / "checkpoints").mkdir(parents=True)
    (left / "metrics.jsonl").write_text("cut")
    run = gone_on(tmp_path / "second", objects)
    assert run.folder.name == "scripted-2" and run.history() == history
    assert not left.exists()


def test_a_folder_or_a_configuration_that_names_the_store_is_enough(
    tmp_path: Path, history: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, runs = MemoryObjects(), tmp_path / "second" / "runs"
    killed = begun(tmp_path / "first", objects, 5)
    monkeypatch.setattr(fetch, "open_store", lambda url: objects)
    empty = runs / "scripted"
    empty.mkdir(parents=True)
    (empty / CONFIG).write_bytes((killed.folder / CONFIG).read_bytes())
    folder, overrides = folder_to_resume(str(empty), [], [f"run.dir={runs}"], fetch.from_store)
    assert (folder, overrides) == (empty, [f"run.dir={runs}"]) and list((folder / JOURNAL).iterdir())

    named, _ = folder_to_resume("gone", [killed.folder / CONFIG], [f"run.dir={tmp_path / 'third'}"], fetch.from_store)
    assert find_run(named) == tmp_path / "third" / "scripted"
    url = "s3://bucket/run"
    _, overrides = folder_to_resume(url, [], [f"run.dir={tmp_path / 'fourth'}"], fetch.from_store)
    assert overrides[-1] == f"run.store={url}"
    with pytest.raises(UserError, match="neither the address of a store, a run folder"):
        folder_to_resume("gone", [], [], fetch.from_store)


@pytest.mark.parametrize("moved", range(5))
def test_a_restoration_to_a_folder_that_was_killed_while_it_moved_files_is_done_again(
    tmp_path: Path, history: list[str], monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    objects, folder = MemoryObjects(), tmp_path / "runs" / "scripted"
    killed = begun(tmp_path / "first", objects, 5)
    monkeypatch.setattr(fetch, "open_store", lambda url: objects)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes((killed.folder / CONFIG).read_bytes())
    moves, replace_file = count(), os.replace

    def replace_some(source: Path, target: Path) -> None:
        if target.parent == folder and next(moves) == moved:
            raise KeyboardInterrupt
        replace_file(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace_some)
        with suppress(KeyboardInterrupt):
            folder_to_resume(str(folder), [], [], fetch.from_store)
    config = load([folder_to_resume(str(folder), [], [], fetch.from_store)[0] / CONFIG], []).config
    with resumed(config.run, config.trainer, folder) as manifest:
        run = ScriptedRun(folder, config, objects, manifest)
    run.train()
    assert run.history() == history
    assert next(moves) > moved, "all files were moved before the kill"


def test_a_process_that_restores_a_run_to_a_folder_leaves_what_another_one_has_restored_there(
    tmp_path: Path, history: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, folder = MemoryObjects(), tmp_path / "runs" / "scripted"
    killed = begun(tmp_path / "first", objects, 5)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes((killed.folder / CONFIG).read_bytes())
    runs = list[ScriptedRun]()

    def loaded_late(files: Sequence[Path], overrides: Sequence[str]) -> Loaded:
        """Meanwhile the other process restores the run, and takes its steps."""
        monkeypatch.setattr(resuming, "load", load)
        monkeypatch.setattr(fetch, "open_store", lambda url: objects)
        assert folder_to_resume(str(folder), [], [], fetch.from_store)[0] == folder
        config = load([folder / CONFIG], []).config
        with resumed(config.run, config.trainer, folder) as manifest:
            runs.append(ScriptedRun(folder, config, objects, manifest))
        runs[0].train()
        return load(files, overrides)

    with lock_run(folder), pytest.raises(UserError, match="a run is going on in this folder"):
        folder_to_resume(str(folder), [], [], fetch.from_store)
    monkeypatch.setattr(resuming, "load", loaded_late)
    assert folder_to_resume(str(folder), [], [], fetch.from_store)[0] == folder
    assert runs[0].history() == history and runs[0].checkpoints.steps() == [4, 6]


def test_a_checkpoint_that_a_running_process_replaces_while_it_is_read_costs_no_resumption(
    tmp_path: Path, history: list[str]
) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)
    said = list[str]()

    def replaced(doing: str, name: str) -> bool:
        if doing == "get" and "step_4/trainer" in name:
            objects.delete([name for name in objects.sizes() if "step_4" in name])
        return False

    objects.fails = replaced
    assert gone_on(tmp_path / "second", objects, said).history() == history
    assert not [line for line in said if "passed over" in line]


def test_a_place_that_is_a_link_to_itself_is_named_in_one_line(tmp_path: Path) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 0)
    (tmp_path / "runs").symlink_to(tmp_path / "runs")
    with pytest.raises(UserError, match=rf"{tmp_path / 'runs'}.*; the run's folder cannot be made from {objects.url}"):
        gone_on(tmp_path, objects)


OWN = '{"run": "00000000000000000000000000000000", "owners": ["o"]'


@pytest.mark.parametrize("mark", [None, "{", OWN + ', "lost": ["o", -1]}', OWN + f', "lost": ["o", {10**30}]}}'])
def test_a_damaged_mark_is_refused_and_in_another_run_s_folder_keeps_nobody_from_the_store(
    tmp_path: Path, history: list[str], mark: str | None
) -> None:
    """Without a text the mark is a folder."""
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)
    other = tmp_path / "second" / "runs" / "other"
    other.mkdir(parents=True)
    (other / STORE_MARK).mkdir() if mark is None else (other / STORE_MARK).write_text(mark)
    with pytest.raises(UserError, match=r"store\.json cannot be read"):
        claimed(objects, other)
    assert gone_on(tmp_path / "second", objects).history() == history


def test_a_disk_that_is_full_while_a_run_is_read_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)

    def full(file: Path) -> None:
        if file.is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")  # as a write raises it: without the file's name

    monkeypatch.setattr(fetch, "sync", full)
    with pytest.raises(UserError) as refused:
        gone_on(tmp_path / "second", objects)
    assert "None" not in str(refused.value) and "No space left on device" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert not list((tmp_path / "second" / "runs").glob("*"))
