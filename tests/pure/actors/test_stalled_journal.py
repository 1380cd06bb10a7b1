"""A disk with no room at all: whoever waits for it shows in the status, and goes on by itself when there is room."""

import asyncio
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import actors.buffer.actor
from actors.buffer.actor import BufferActor
from service.config import Config
from service.handoff.journal.journal import Journal
from tests.sim.faults import FaultyDisk


async def joined_late(buffer: BufferActor, disk: FaultyDisk) -> None:
    """A trainer joins while the disk is full; nobody else asks for anything."""
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


def test_who_waits_for_a_full_disk_shows_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr(actors.buffer.actor, "Journal", partial(Journal, disk=disk))
    monkeypatch.setattr(actors.buffer.actor, "lock_journal", lambda folder, seconds: io.StringIO())
    (tmp_path / "tasks.jsonl").write_text('{"uid": "p0", "prompt": "a"}\n')

    async def scene() -> None:
        hub = SimpleNamespace(push=SimpleNamespace(remote=lambda *told: None))
        told = (Config().model_dump_json(), 100, str(tmp_path / "tasks.jsonl"), str(tmp_path / "journal"), hub)
        buffer = BufferActor(*told)
        await buffer.ready()
        await joined_late(buffer, disk)

    asyncio.run(scene())
