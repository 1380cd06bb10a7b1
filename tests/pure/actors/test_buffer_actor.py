"""Thousands of generators wait at one buffer, and each change wakes only those that it serves."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import actors.buffer.actor
from actors.buffer.actor import BufferActor
from service.config import Config, load_config
from service.handoff.verbs import Claim, Wait, WaitReason
from service.handoff.waiting_claims import ClaimAnswer
from service.types import PolicyVersion

GENERATORS, ROOM = 500, 4


def config() -> Config:
    """Room for so many groups, until the trainer leaves."""
    return load_config(
        [],
        [
            "data.train=tasks.jsonl",
            f"trainer.mini_batch_size={ROOM}",
            "trainer.ranks=1",
            f"generator.concurrent_groups={ROOM}",
            "buffer.lookahead=0",
            "algorithm.n_samples_per_prompt=2",
        ],
    )


@pytest.fixture(autouse=True)
def no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.buffer.actor, "lock_journal", lambda folder, seconds: io.StringIO())


async def joined(folder: Path) -> BufferActor:
    hub = SimpleNamespace(push=SimpleNamespace(remote=lambda *told: None))
    (folder / "tasks.jsonl").write_text('{"uid": "p0", "prompt": "a"}\n')
    buffer = BufferActor(config().model_dump_json(), 100, str(folder / "tasks.jsonl"), str(folder / "journal"), hub)
    await asyncio.gather(*(buffer.join("generator", f"g{number}") for number in range(GENERATORS)))
    return buffer


def test_of_thousands_of_waiting_claims_a_change_asks_few_and_serves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.buffer.actor, "TICK_SECONDS", 3600.0)

    async def scene() -> None:
        buffer = await joined(tmp_path)
        asked, ask = Counter[str](), buffer._claims._ask

        def counted(claim: Claim, most: int) -> ClaimAnswer:
            asked[claim.generator] += 1
            return ask(claim, most)

        buffer._claims._ask = counted
        claims = [Claim(f"g{number}", 1, PolicyVersion(0, 0), 1) for number in range(GENERATORS)]
        polls = [asyncio.ensure_future(buffer.claim(claim, 600.0)) for claim in claims]
        first = await asyncio.gather(*polls[:ROOM])
        assert [type(answer) for answer in first] == [list] * ROOM
        assert asked.total() <= GENERATORS + ROOM
        asked.clear()
        await buffer.leave("g1", 1, "gone")  # its group is given to the one that waits longest
        moved = await polls[ROOM]
        assert isinstance(moved, list) and [given.group_id for given in moved] == [1]
        assert asked.total() <= 3
        asked.clear()
        await buffer.drain("max_steps")
        left = await asyncio.gather(*polls[ROOM + 1 :])
        assert {answer.reason for answer in left if isinstance(answer, Wait)} == {WaitReason.DRAINED}
        assert asked.total() <= GENERATORS
        await buffer.stop()

    asyncio.run(scene())


def test_a_claim_gets_its_reason_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.buffer.actor, "TICK_SECONDS", 0.01)

    async def scene() -> None:
        buffer = await joined(tmp_path)
        for number in range(ROOM):
            assert isinstance(await buffer.claim(Claim(f"g{number}", 1, PolicyVersion(0, 0), 1), 600.0), list)
        async with asyncio.timeout(60):
            waited = await buffer.claim(Claim("g9", 1, PolicyVersion(0, 0), 1), 0.05)
        assert isinstance(waited, Wait) and waited.reason is WaitReason.LOOKAHEAD
        await buffer.stop()

    asyncio.run(scene())
