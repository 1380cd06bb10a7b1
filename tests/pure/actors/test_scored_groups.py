"""The buffer's actor asks scorers about every group that waits for them, whatever made it wait."""

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace

import pytest

import actors.buffer.actor
from actors.buffer.actor import BufferActor
from service.handoff.verbs import Receipt
from service.types import TrajectoryEnd, TrajectoryId
from tests.pure.buffer.world import START, Generator, config, step
from tests.pure.scorers.test_asking import GOOD, Fake


def test_a_group_that_its_deadline_cuts_short_is_scored_although_nobody_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(
        algorithm={"n_samples_per_prompt": 3},
        buffer={"on_group_deadline": "train_partial", "group_deadline": 0.05},
        trainer={"mini_batch_size": 1},
        scorers={"judge": {"use": "mine:judge"}},
    )
    judge = Fake(lambda row, time: GOOD)
    monkeypatch.setattr(actors.buffer.actor, "lock_journal", lambda folder, seconds: io.StringIO())
    (tmp_path / "tasks.jsonl").write_text('{"uid": "p0", "prompt": "a"}\n')

    async def scene() -> None:
        hub = SimpleNamespace(push=SimpleNamespace(remote=lambda *told: None))
        told = (settings.model_dump_json(), 500, str(tmp_path / "tasks.jsonl"), str(tmp_path / "journal"), hub)
        actor = BufferActor(*told, workers=lambda scorers: {"judge": [judge]})
        await actor.join("trainer", "trainer")
        await asyncio.sleep(0)
        generator = Generator(actor._buffer)
        work = generator.claimed(START)
        for sample in range(2):  # the third never ends
            of = TrajectoryId(work.group_id, sample)
            sent = generator.send([step(of, "p0", 0)], [TrajectoryEnd(of, "p0", 1, "stop", 1.0)])
            assert isinstance(sent, Receipt)
        async with asyncio.timeout(30):
            while not judge.asked:
                await asyncio.sleep(0.02)
        await actor.stop()

    asyncio.run(scene())
