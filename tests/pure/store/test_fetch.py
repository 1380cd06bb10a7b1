"""A run goes on from its store on an empty disk as if it had never stopped, and never with parts of another run."""

import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from service.config import Config, load
from service.errors import ConfigError, RunFailed, UserError
from service.handoff.ledger.events import Fate
from service.run.folder import CONFIG, JOURNAL, find_run, lock_run
from service.run.preparing.resuming import folder_to_resume, resumed
from service.store import fetch
from service.store.objects import manifest_name, run_id, stored_steps
from tests.pure.store.memory import MemoryObjects
from tests.pure.store.scripted import STEPS, ScriptedRun, begun_uploads, settings
from tests.waiting import until


def begun(folder: Path, objects: MemoryObjects | None, steps: int = STEPS) -> ScriptedRun:
    """A run that has taken some steps and was killed then."""
    run = ScriptedRun(folder / "runs" / "scripted", settings(folder / "runs"), objects)
    run.train(steps)
    return run


def gone_on(disk: Path, objects: MemoryObjects, steps: int = STEPS) -> ScriptedRun:
    """The run, resumed from the store on another disk."""

    def loaded(file: Path) -> Config:
        return load([file], [f"run.dir={disk / 'runs'}"]).config

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetch, "Objects", lambda url: objects)
        folder = fetch.from_store(objects.url, loaded)
    run = again(folder, loaded(folder / CONFIG), objects)
    run.train(steps)
    return run


def again(folder: Path, config: Config, objects: MemoryObjects) -> ScriptedRun:
    """The run in a folder, resumed."""
    with resumed(config.run, config.trainer, folder) as manifest:
        return ScriptedRun(folder, config, objects, manifest)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of the run that nothing interrupts."""
    return begun(tmp_path_factory.mktemp("whole"), None).history()


def test_a_run_goes_on_on_an_empty_disk_with_the_history_of_the_uninterrupted_one(
    tmp_path: Path, history: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)
    run = gone_on(tmp_path / "second", objects)
    assert run.history() == history
    assert "what the run did after the upload of step 4 is lost" in capsys.readouterr().out
    run.end()
    assert stored_steps(objects.held) == [6, 4] and "summary.json" in objects.held
    assert objects.held["final/model.safetensors"] == (run.folder / "final" / "model.safetensors").read_bytes()
    assert {name.split("/")[0] for name in objects.held} >= {"step_6", "step_4"} and "step_2" not in str(objects.held)
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
            asked += doing not in ("get", "list")
            return asked > dies_at  # noqa: B023 - is called in this round only

        run = ScriptedRun(disk / "first" / "runs" / "scripted", settings(disk / "first" / "runs"), objects)
        objects.fails = dead
        run.train(5)
        if asked <= dies_at:
            break
        moments += 1
        assert gone_on(disk / "second", MemoryObjects(dict(objects.held))).history() == history
    assert moments > 35 // stride  # two checkpoints, each with its files at two moments, and what is deleted


def test_what_was_trained_after_the_checkpoint_counts_as_rolled_back(tmp_path: Path) -> None:
    objects = MemoryObjects()
    killed = ScriptedRun(tmp_path / "first" / "runs" / "scripted", settings(tmp_path / "first" / "runs"), objects)
    objects.fails = lambda doing, name: "step_4" in name
    killed.train(5)
    objects.fails = lambda doing, name: False
    killed.world.journal.sync()
    status = killed.world.buffer.status()
    assert killed.uploads.checkpoint(4, status.journal_start, status.journal_synced)  # after step 5 was trained
    until(lambda: not killed.uploads.left())
    run = gone_on(tmp_path / "second", objects, steps=4)
    ledger = run.world.buffer.ledger.state
    assert (
        ledger.fates[Fate.ROLLED_BACK] > 0 and ledger.accepted == sum(ledger.fates.values()) == status.accepted_tokens
    )


def weights(objects: MemoryObjects) -> str:
    return next(name for name in objects.held if name.startswith("step_4/") and "trainer/rank_0" in name)


SPOILT: dict[str, Callable[[MemoryObjects], object]] = {
    "is missing": lambda objects: objects.held.pop(weights(objects)),
    "has other bytes than were written": lambda objects: objects.held.update({weights(objects): b"12345678"}),
    "manifest.json is damaged (Invalid JSON": lambda objects: objects.held.update({manifest_name(4): b"{"}),
}


@pytest.mark.parametrize("why", SPOILT)
def test_a_damaged_checkpoint_is_refused_until_its_manifest_is_deleted(
    tmp_path: Path, history: list[str], why: str
) -> None:
    objects = MemoryObjects()
    begun(tmp_path / "first", objects, 5)
    SPOILT[why](objects)
    with pytest.raises(UserError, match=f"{re.escape(why)}.* delete (it|{manifest_name(4)})"):
        gone_on(tmp_path / "second", objects)
    assert not list((tmp_path / "second" / "runs").glob("*")), "a part of a run is left"
    del objects.held[manifest_name(4)]
    assert gone_on(tmp_path / "third", objects).history() == history


def test_a_store_without_a_checkpoint_or_with_a_mistake_in_its_configuration_is_refused(tmp_path: Path) -> None:
    objects = MemoryObjects({CONFIG: b""})
    with pytest.raises(UserError, match="memory://bucket/run holds no checkpoint of a run"):
        gone_on(tmp_path, objects)
    begun(tmp_path / "first", objects := MemoryObjects(), 5)
    (stored,) = (name for name in objects.held if name.startswith("step_4") and name.endswith(CONFIG))
    objects.held[stored] += b"wrong: 1\n"
    with pytest.raises(ConfigError, match=rf"{objects.url}/{CONFIG}:\d+  wrong: unknown key"):
        gone_on(tmp_path, objects)


def test_a_folder_or_a_configuration_that_names_the_store_is_enough(
    tmp_path: Path, history: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, runs = MemoryObjects(), tmp_path / "second" / "runs"
    killed = begun(tmp_path / "first", objects, 5)
    monkeypatch.setattr(fetch, "Objects", lambda url: objects)
    empty = runs / "scripted"
    empty.mkdir(parents=True)
    (empty / CONFIG).write_bytes((killed.folder / CONFIG).read_bytes())
    with lock_run(empty), pytest.raises(UserError, match="a run is going on in this folder"):
        folder_to_resume(str(empty), [], [], fetch.from_store)
    folder, overrides = folder_to_resume(str(empty), [], [f"run.dir={runs}"], fetch.from_store)
    assert (folder, overrides) == (empty, [f"run.dir={runs}"]) and list((folder / JOURNAL).iterdir())

    named, _ = folder_to_resume("gone", [killed.folder / CONFIG], [f"run.dir={tmp_path / 'third'}"], fetch.from_store)
    assert find_run(named) == tmp_path / "third" / "scripted"
    url = "s3://bucket/run"
    _, overrides = folder_to_resume(url, [], [f"run.dir={tmp_path / 'fourth'}"], fetch.from_store)
    assert overrides[-1] == f"run.store={url}"
    with pytest.raises(UserError, match="neither the address of a store, a run folder"):
        folder_to_resume("gone", [], [], fetch.from_store)


@pytest.mark.parametrize("n_read", [1, 5])
def test_a_restoration_that_is_killed_is_done_again_without_what_it_left(
    tmp_path: Path, history: list[str], monkeypatch: pytest.MonkeyPatch, n_read: int
) -> None:
    objects, folder = MemoryObjects(), tmp_path / "runs" / "scripted"
    killed = begun(tmp_path / "first", objects, 5)
    monkeypatch.setattr(fetch, "Objects", lambda url: objects)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes((killed.folder / CONFIG).read_bytes())
    reads = count()

    def killed_later(doing: str, name: str) -> bool:
        if doing == "get" and next(reads) == n_read:
            (folder / JOURNAL).mkdir(exist_ok=True)
            (folder / JOURNAL / "00000000000000000000.journal").write_bytes(b"of another checkpoint")
            raise KeyboardInterrupt
        return False

    objects.fails = killed_later
    with pytest.raises(KeyboardInterrupt):
        folder_to_resume(str(folder), [], [], fetch.from_store)
    config = load([folder_to_resume(str(folder), [], [], fetch.from_store)[0] / CONFIG], []).config
    run = again(folder, config, objects)
    run.train()
    assert run.history() == history


def test_an_upload_takes_longer_than_its_checkpoint_is_on_the_disk(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = ScriptedRun(tmp_path / "scripted", settings(tmp_path), objects)
    run.settles = lambda: None

    def slow(doing: str, name: str) -> bool:
        until(lambda: run.step == STEPS)
        return False

    objects.fails = slow
    run.train()
    until(lambda: not run.uploads.left())
    assert not (run.folder / "checkpoints" / "step_2").exists() and stored_steps(objects.names()) == [6, 2]
    assert run.uploads.status.step == 6 and run.uploads.status.failures == 0, "those between were replaced"


def test_a_checkpoint_that_is_given_up_is_told_and_the_next_one_stands_in_for_it(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = ScriptedRun(tmp_path / "scripted", settings(tmp_path), objects)
    objects.fails = lambda doing, name: "step_2" in name and doing == "done"
    run.train(2)
    assert "step 2" in run.uploads.status.failing and run.uploads.status.failures == 1
    objects.fails = lambda doing, name: "step_6" in name or doing == "delete"
    run.train(4)
    assert run.uploads.status.failing == "" and stored_steps(objects.names()) == [4, 0]
    assert [line for line in run.said if "the old checkpoints in the store are not deleted" in line]
    run.train(6)
    with pytest.raises(RunFailed, match=r"lacks files that only .* has now: not uploaded: the checkpoint of step 6"):
        run.end()


def test_a_store_belongs_to_one_run(tmp_path: Path) -> None:
    objects = MemoryObjects()
    run = begun(tmp_path, objects, 2)
    for step in (None, 2):
        with pytest.raises(UserError, match=r"holds another run; give another place, or go on with that run"):
            begun_uploads(objects, settings(tmp_path), tmp_path, step)
    with pytest.raises(UserError, match=r"holds other files \(a/b, ...\)"):
        begun_uploads(MemoryObjects({"a/b": b""}), settings(tmp_path), tmp_path, None)
    with pytest.raises(UserError, match=r"has step 2, and .* only step 0"):
        begun_uploads(objects, settings(tmp_path), run.folder, 0)


def test_of_two_processes_of_a_run_the_step_that_is_written_second_is_not_uploaded_and_nothing_is_mixed(
    tmp_path: Path, history: list[str]
) -> None:
    objects = MemoryObjects()
    older = begun(tmp_path / "first", objects, 4)
    newer = gone_on(tmp_path / "second", objects, steps=6)
    manifest = objects.held[manifest_name(6)]
    older.train(6)
    with pytest.raises(RunFailed, match="has the checkpoint of step 6 from another process of this run"):
        older.end()
    assert objects.held[manifest_name(6)] == manifest and "summary.json" not in objects.held
    assert run_id(newer.folder) == run_id(older.folder)
    assert gone_on(tmp_path / "third", objects).history() == history


def test_the_journal_of_another_machine_is_not_uploaded(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path / "scripted", settings(tmp_path), MemoryObjects())
    os.rename(run.folder / JOURNAL, tmp_path / "elsewhere")
    assert not run.uploads.checkpoint(0, 0, 100)
    assert "a part of the journal is not there" in run.uploads.status.failing
