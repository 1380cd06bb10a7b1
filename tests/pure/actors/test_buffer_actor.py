"""The buffer's actor: who waits at it, what wakes whom, and a journal that belongs to one process."""

import asyncio
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actors.buffer.actor
from actors.buffer.actor import BufferActor, lock_journal
from service.config import Config, load_config
from service.errors import JournalError, RunFailed
from service.handoff.journal.journal import Journal
from service.handoff.verbs import Claim, Receipt, Wait, WaitReason
from service.types import PolicyVersion, TrajectoryEnd, TrajectoryId
from tests.pure.actors.fakes import until
from tests.pure.buffer.world import START, Generator, config, step
from tests.pure.scorers.test_asking import Fake, asked_of
from tests.sim.disk import MemoryDisk

GENERATORS, ROOM = 10, 4
LOCK = lock_journal


@pytest.fixture(autouse=True)
def no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.buffer.actor, "lock_journal", lambda folder, seconds: io.StringIO())


def buffer_of(settings: Config, folder: Path, **more: Any) -> BufferActor:
    hub = SimpleNamespace(push=SimpleNamespace(remote=lambda *told: None))
    (folder / "tasks.jsonl").write_text('{"uid": "p0", "prompt": "a"}\n')
    files = str(folder / "tasks.jsonl"), str(folder / "journal")
    return BufferActor(settings.model_dump_json(), 500, *files, hub, **more)


async def joined(folder: Path) -> BufferActor:
    """Generators at a buffer with room for few groups, until the trainer leaves."""
    settings = [f"trainer.mini_batch_size={ROOM}", "trainer.ranks=1", f"generator.concurrent_groups={ROOM}"]
    settings += ["data.train=tasks.jsonl", "buffer.lookahead=0", "algorithm.n_samples_per_prompt=2"]
    buffer = buffer_of(load_config([], settings), folder)
    await asyncio.gather(*(buffer.join("generator", f"g{number}") for number in range(GENERATORS)))
    return buffer


def claim_of(number: int) -> Claim:
    return Claim(f"g{number}", 1, PolicyVersion(0, 0), 1)


async def test_a_claim_gets_its_reason_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.buffer.actor, "TICK_SECONDS", 0.01)
    buffer = await joined(tmp_path)
    for number in range(ROOM):
        assert isinstance(await buffer.claim(claim_of(number), 600.0), list)
    async with asyncio.timeout(60):
        waited = await buffer.claim(claim_of(9), 0.05)
    assert isinstance(waited, Wait) and waited.reason is WaitReason.LOOKAHEAD
    await buffer.stop()


async def test_a_group_that_its_deadline_cuts_short_is_scored_although_nobody_calls_and_a_lease_waits_for_that(
    tmp_path: Path,
) -> None:
    settings = config(
        algorithm={"n_samples_per_prompt": 3},
        buffer={"group_deadline": 0.05},
        trainer={"mini_batch_size": 1},
        scorers={"judge": {"use": "mine:judge"}},
    )
    judge = Fake(lambda row, time: None)
    asking = partial(asked_of, {"judge": [judge]})
    actor = buffer_of(settings, tmp_path, asking=asking)
    incarnation = await actor.join("trainer", "trainer")
    await asyncio.sleep(0)
    generator = Generator(actor._buffer)
    work = generator.claimed(START)
    for sample in range(2):  # the third never ends
        of = TrajectoryId(work.group_id, sample)
        sent = generator.send([step(of, "p0", 0)], [TrajectoryEnd(of, "p0", 1, "stop", 1.0)])
        assert isinstance(sent, Receipt)
    await until(lambda: judge.asked)
    before = (await actor.scorer_failures())[2]
    assert isinstance(await actor.lease(incarnation, 0.3), Wait)
    assert (await actor.scorer_failures())[2] - before >= 0.29
    await actor.stop()


async def test_who_waits_for_a_full_disk_shows_in_the_status_and_continues_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer joins while the disk is full; nobody else asks for anything."""
    disk = MemoryDisk()
    monkeypatch.setattr(actors.buffer.actor, "Journal", partial(Journal, disk=disk))
    buffer = buffer_of(Config(), tmp_path)
    await buffer.ready()
    disk.room = disk.used()
    join = asyncio.ensure_future(buffer.join("trainer", "trainer"))
    async with asyncio.timeout(60):
        while not (waits := (await buffer.status())["waits"]):
            await asyncio.sleep(0.01)
    assert [(wait["who"], wait["reason"]) for wait in waits] == [("journal", "disk")]
    assert "is full" in waits[0]["detail"] and not join.done()
    disk.room = 1 << 40
    async with asyncio.timeout(60):
        assert await join == 1
        while (await buffer.status())["waits"]:
            await asyncio.sleep(0.01)


def test_a_journal_belongs_to_one_process_until_that_ends(tmp_path: Path) -> None:
    first = LOCK(tmp_path / "journal", 0.0)
    with pytest.raises(RunFailed, match="another process still writes this journal"):
        LOCK(tmp_path / "journal", 0.1)
    first.close()
    LOCK(tmp_path / "journal", 0.0).close()


async def test_a_damaged_journal_is_said_to_whoever_asks_instead_of_ending_the_process(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "first.journal").touch()
    buffer = buffer_of(config(), tmp_path)
    for method in (buffer.ready, buffer.status):
        with pytest.raises(JournalError, match="a segment's name is the position"):
            await method()
