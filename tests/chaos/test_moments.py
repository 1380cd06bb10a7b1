"""Kills at any moment, and of Ray's own processes; and a buffer with a bug, which has to be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.cast import JUDGE, noted_scores
from tests.chaos.theatre import SEED, Play, settings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

Stage = Callable[[str], Play]


def test_kills_at_any_moment_of_a_run_ahead_of_its_trainer_lose_nothing(staged: Stage) -> None:
    told = settings(lookahead=2, steps=100_000)
    play = staged(f"seed-{SEED}").tell(told, generators=2, turn_seconds=0.01, step_seconds=0.05, concurrency=4).start()
    play.until_step(3)
    play.kill_at_random(SEED, 50, ["buffer", "buffer", "trainer", "generator-0", "generator-1"])
    play.stop()
    report = play.ended(300)
    assert len(report["history"]) > 20


@pytest.mark.parametrize("part", range(2))
def test_a_groups_score_is_the_journalled_one_whoever_is_killed_while_it_is_scored(staged: Stage, part: int) -> None:
    play = staged(f"judged-{part}")
    judge = {"use": "tests.chaos.cast:Judge", "options": {"folder": str(play.folder)}, "attempts": 1000}
    told = settings(lookahead=2, steps=100_000) | {"scorers": {"judge": judge}}
    play.tell(told, generators=2, turn_seconds=0.01, step_seconds=0.05, concurrency=4).start()
    play.until_step(3)
    for number in range(3):
        play.kill_at_random(10 * SEED + 3 * part + number, 8, ["buffer", JUDGE, JUDGE, "generator-0", "trainer"])
        goal = play.step() + 2
        if number < 2:
            play.kill_everything()  # the driver too
            play.start()
        play.until_step(goal)
    play.stop()
    report = play.ended(300)
    trained = {group_id for entry in report["history"] for group_id in entry["groups"]}
    assert trained <= noted_scores(play.folder).keys() and sum(play.kills.values()) == 26
    assert report["status"]["scorers"]["judge"]["refused"] == 0
    play.figures["groups trained with the judge's journalled score"] += len(trained)


@pytest.mark.parametrize(("daemon", "seconds"), [("raylet", 90), ("gcs_server", 150)])
def test_a_run_whose_ray_is_killed_ends_by_itself_and_goes_on(
    staged: Stage, calm: dict[str, Any], daemon: str, seconds: float
) -> None:
    play = staged(daemon).tell(settings(steps=60), step_seconds=1.0, ray_seconds=40.0).start()
    play.until_step(4)
    play.kill_daemon(daemon)
    assert play.process is not None and play.process.wait(seconds) != 0
    play.told["step_seconds"] = 0.0
    play.retell()
    assert play.start().ended(300)["history"] == calm["history"][:60]


def test_a_buffer_that_acknowledges_too_early_is_caught(staged: Stage) -> None:
    told = settings(steps=100_000)
    play = staged("early").tell(told, {"buffer": [("append.before_write", 12)]}, early=True).start()
    broken = play.folder / "broken.txt"
    play.until(broken.exists)
    assert "lost: group=" in broken.read_text()
    play.end()
    broken.unlink()
