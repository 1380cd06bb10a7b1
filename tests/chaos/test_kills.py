"""Kills at every named seam, and of the whole run; nothing acknowledged is lost, nothing trained twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.chaos.doom import BUFFER_SEAMS, GENERATOR_SEAMS, TRAINER_SEAMS
from tests.chaos.theatre import SEED, STEPS, Play, settings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

Stage = Callable[[str], Play]

PASSES = {"append": 6, "submit": 4, "claim": 3, "turn": 6}
"""Seams that are passed often: the highest pass at which to die."""


def plan(seed: int, seams: Sequence[str], times: int) -> list[tuple[str, int]]:
    """Each seam so many times, in any order."""
    rng = random.Random(seed)
    entries = [(seam, rng.randint(1, PASSES.get(seam.partition(".")[0], 1))) for seam in seams for _ in range(times)]
    rng.shuffle(entries)
    return entries


def test_a_buffer_killed_at_every_seam_ends_with_the_ledger_of_an_uninterrupted_run(
    staged: Stage, calm: dict[str, Any]
) -> None:
    # The first kill comes after everybody joined: joining again is a new incarnation, which the ledger remembers.
    dooms = [("claim.after", 3), *plan(SEED, BUFFER_SEAMS, 5)]
    play = staged(f"seed-{SEED}").tell(settings(steps=STEPS), {"buffer": dooms}).start()
    report = play.ended(600)
    assert len(play.deaths("buffer")) == len(dooms)
    assert report["history"] == calm["history"]
    assert report["digest"] == calm["digest"]


def test_everybody_killed_at_every_seam_leaves_the_history_of_an_uninterrupted_run(
    staged: Stage, calm: dict[str, Any]
) -> None:
    dooms = {
        "buffer": plan(SEED + 1, BUFFER_SEAMS, 1),
        "trainer": plan(SEED + 2, TRAINER_SEAMS, 4),
        "generator-0": plan(SEED + 3, GENERATOR_SEAMS, 5),
    }
    play = staged(f"seed-{SEED}").tell(settings(steps=STEPS), dooms).start()
    report = play.ended(600)
    assert {role: len(play.deaths(role)) for role in dooms} == {role: len(entries) for role, entries in dooms.items()}
    assert report["history"] == calm["history"]


def test_a_run_killed_as_a_whole_goes_on_as_if_nothing_had_been(staged: Stage, calm: dict[str, Any]) -> None:
    rng = random.Random(SEED)
    play = staged(f"seed-{SEED}").tell(settings(steps=60), step_seconds=0.02).start()
    for reached in (8, 21, 33, 47):
        play.until_step(reached + rng.randrange(3))
        play.kill_everything()
        play.start()
    assert play.ended(300)["history"] == calm["history"][:60]
