"""Scorers are asked within deadlines and attempts; what they do wrong costs the group that they were asked about."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from service.handoff.scoring import Answer
from service.scorers.asking import Asking
from service.scorers.reply import (
    MAX_REPLY_BYTES,
    REASONS,
    Failure,
    ScoreReply,
    ScorerFailed,
    encode_answer,
)
from tests.pure.buffer.test_scoring import JUDGE, opened, played
from tests.pure.buffer.world import World

GOOD = encode_answer(Answer((0.25, 0.75)))
Behaviour = Callable[[int], Awaitable[Any]]


class Fake:
    """A worker that answers about each group as the test says."""

    def __init__(self, answers: Callable[[int, int], Any]) -> None:
        self.answers = answers
        self.asked: list[int] = []
        self.renewed = 0
        self.at_once = self.most_at_once = 0

    async def ready(self) -> None:
        await asyncio.sleep(0)

    async def ask(self, row: int, group: bytes) -> bytes:
        self.asked.append(row)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = self.answers(row, self.asked.count(row))
            if answer is None:
                await asyncio.sleep(3600)
            await asyncio.sleep(0.001)
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]
        finally:
            self.at_once -= 1

    def renew(self) -> None:
        self.renewed += 1


async def until_scored(world: World, workers: list[Fake], first_pause: float = 0.001) -> None:
    """Ask until no group waits."""

    async def settled() -> None:
        world.journal.sync()

    scoring = world.buffer.scoring
    asking = Asking(world.settings.scorers, scoring, {"judge": workers}, settled, first_pause)
    running = asyncio.ensure_future(asking.run())
    async with asyncio.timeout(30):
        while scoring.pending("judge") and not running.done():
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    if not running.cancelled():
        running.result()


def asked_of(workers: Any, scorers: Any, scoring: Any, settled: Any) -> Asking:
    """What asks these workers, in place of the actors of scorers."""
    return Asking(scorers, scoring, workers, settled)


def judged(folder: Path, answers: Callable[[int, int], Any], groups: int = 6, **judge: Any) -> tuple[World, Fake]:
    """A world whose groups were all asked about."""
    world = opened(folder, {"judge": JUDGE | {"attempts": 2} | judge}, buffer={"lookahead": 50})
    played(world, groups)
    fake = Fake(answers)
    asyncio.run(until_scored(world, [fake, fake]))
    return world, fake


BAD: dict[str, tuple[Any, str]] = {
    "not a number": (encode_answer(Answer((0.5, float("nan")))), "reward"),
    "one too few": (encode_answer(Answer((0.5,))), "length_mismatch"),
    "of a teacher": (encode_answer(Answer(logprobs=np.zeros(8, np.float32))), "length_mismatch"),
    "ten megabytes": (bytes(10 << 20), "too_large"),
    "long info": (msgspec.msgpack.encode(ScoreReply([0.5, 0.5], ["x" * MAX_REPLY_BYTES * 2, ""])), "too_large"),
    "other bytes": (b"\xc1\xff" * 40, "malformed"),
    "texts": (msgspec.msgpack.encode(ScoreReply([0.5, 0.5], ["a", "b"])).replace(b"rewards", b"REWARDS"), "malformed"),
    "half a number": (msgspec.msgpack.encode(ScoreReply(None, [], b"abc")), "malformed"),
    "an exception": (ScorerFailed(Failure.RAISED, "RuntimeError: no"), "raised"),
    "a death": (ScorerFailed(Failure.DIED, "its process died"), "died"),
    "status 500": (ScorerFailed(Failure.HTTP, "status 500"), "http"),
    "a hang": (None, "deadline"),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_answer_costs_its_own_group_only(tmp_path: Path, bad: str) -> None:
    answer, reason = BAD[bad]
    deadline = 1.0 if answer is None else 60.0
    world, fake = judged(tmp_path, lambda row, time: answer if row == 2 else GOOD, deadline=deadline)
    status = world.buffer.status()
    assert status.ended == {"refused/scorer": 1} and status.groups["complete"] == 5 and world.closes()
    assert reason in REASONS and status.scorers["judge"].failures == {reason: 2} and fake.asked.count(2) == 2
    assert status.scorers["judge"].last_failure.startswith(reason)
    assert all(fake.asked.count(row) == 1 for row in (0, 1, 3, 4, 5))
    assert fake.renewed == (2 if answer is None else 0)


def test_a_scorer_that_answers_the_second_time_is_used(tmp_path: Path) -> None:
    world, fake = judged(tmp_path, lambda row, time: GOOD if time == 2 else ScorerFailed(Failure.HTTP, "503"))
    status = world.buffer.status()
    assert status.groups["complete"] == 6 and status.scorers["judge"].failures == {"http": 6}
    assert len(fake.asked) == 12 and world.batch().return_G.tolist() == [0.25, 0.75] * 2


def test_a_group_that_pauses_before_its_next_attempt_keeps_no_worker(tmp_path: Path) -> None:
    world = opened(tmp_path, {"judge": JUDGE | {"attempts": 2}})
    played(world)
    fake = Fake(lambda row, time: ScorerFailed(Failure.RAISED, "no") if row == 0 and time == 1 else GOOD)
    asyncio.run(until_scored(world, [fake], first_pause=0.2))
    assert fake.asked == [0, 1, 0] and world.buffer.status().groups["complete"] == 2


def test_groups_refused_in_a_row_are_counted_until_the_next_good_answer(tmp_path: Path) -> None:
    world, _ = judged(tmp_path, lambda row, time: b"" if row < 5 else GOOD, attempts=1)
    scoring = world.buffer.scoring
    assert scoring.in_a_row == {"judge": 0} and world.buffer.status().scorers["judge"].refused == 5
    played(world, 1)
    scoring.give_up(*scoring.pending("judge"), "judge", "http")
    assert scoring.refused()["judge"][0] == 1 and 0 <= scoring.refused()["judge"][1] < 60
    world, _ = judged(tmp_path / "all", lambda row, time: b"", attempts=1)
    assert world.buffer.scoring.refused() == {"judge": (6, math.inf)}, "it never gave a valid answer"


def test_no_more_groups_are_asked_about_at_once_than_there_are_workers(tmp_path: Path) -> None:
    world, fake = judged(tmp_path, lambda row, time: b"", 20, fallback="environment_reward")
    assert fake.most_at_once == 2 and sorted(set(fake.asked)) == list(range(20))
    assert world.buffer.status().scorers["judge"].fallbacks == 20
    assert world.batch().return_G.tolist() == [1.0, 0.0] * 2, "without any answer the environment's rewards count"


@pytest.mark.parametrize("turns", range(8))
async def test_a_group_that_ends_at_any_turn_of_the_loop_after_it_was_seen_is_left_alone(
    tmp_path: Path, turns: int
) -> None:
    world = opened(tmp_path, {"judge": JUDGE})

    async def settled() -> None:
        world.journal.sync()

    workers = {"judge": [Fake(lambda row, time: GOOD)]}
    asking = Asking(world.settings.scorers, world.buffer.scoring, workers, settled)
    running = asyncio.ensure_future(asking.run())
    await asyncio.sleep(0)
    played(world)
    asking.look()
    for _ in range(turns):
        await asyncio.sleep(0)
    world.buffer.end()
    await asyncio.wait([running], timeout=0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.buffer.status().ended == {"expired/run_end": 2} and world.closes()
