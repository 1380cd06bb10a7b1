"""Which prompts are issued, by their success so far; and what it costs to filter groups without variance."""

from pathlib import Path
from typing import Any

import pytest

from service.handoff import prompt_order
from tests.invariant import violations
from tests.pure.buffer.world import World, config

EASY, HARD, FAIR = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


def opened(
    folder: Path, n_prompts: int = 4, algorithm: dict[str, Any] | None = None, shuffle: bool = False, **curriculum: Any
) -> World:
    """A world that may issue everything at once, whose groups are played as the test says."""
    settings = config(
        data={"curriculum": {"outside": 0.0} | curriculum, "shuffle": shuffle},
        buffer={"lookahead": 1000, "max_staleness": 1000},
        algorithm=algorithm or {},
    )
    return World(folder, settings, n_prompts)


def issued(world: World, groups: int, rewards: dict[int, tuple[float, ...]], crash: bool = False) -> list[int]:
    """The rows of the next groups, each played to its end, with rewards by row."""
    rows = []
    for _ in range(groups):
        work = world.generator.claimed()
        rows.append(work.row)
        world.generator.finish(work, rewards=rewards.get(work.row, FAIR))
        if crash:
            world.crash()
    return rows


def test_prompts_outside_of_the_band_are_passed_over_and_the_others_take_their_turn(tmp_path: Path) -> None:
    world = opened(tmp_path)
    assert issued(world, 8, {0: EASY, 2: HARD}) == [0, 1, 2, 3, 1, 3, 1, 3]
    status = world.buffer.status()
    assert status.prompts == {"untried": 0, "below": 1, "inside": 2, "above": 1}
    assert status.passed_over == 4 and status.issued == 8 and violations(world.buffer.ledger) == []


def test_where_no_prompt_lies_in_the_band_all_are_issued(tmp_path: Path) -> None:
    world = opened(tmp_path, n_prompts=3)
    assert issued(world, 7, dict.fromkeys(range(3), HARD)) == [0, 1, 2, 0, 1, 2, 0]


def test_a_prompt_outside_of_the_band_comes_in_a_fraction_of_the_epochs(tmp_path: Path) -> None:
    world = opened(tmp_path, n_prompts=2, outside=0.25)
    rows = issued(world, 200, {0: HARD})
    assert 0.15 < rows.count(0) / rows.count(1) < 0.35


def test_success_is_a_return_above_the_configured_one(tmp_path: Path) -> None:
    world = opened(tmp_path, n_prompts=2, success_above=0.5)
    assert issued(world, 6, {0: (0.5, 0.5)}) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_run_that_crashes_after_every_group_issues_the_same_prompts(tmp_path: Path, shuffle: bool) -> None:
    rewards = {0: EASY, 2: HARD, 5: HARD}
    whole, crashed = (opened(tmp_path / name, 7, shuffle=shuffle, outside=0.3) for name in ("whole", "crashed"))
    assert issued(crashed, 40, rewards, crash=True) == issued(whole, 40, rewards)
    assert crashed.buffer.status().prompts == whole.buffer.status().prompts


@pytest.mark.parametrize("outside", [0.0, 0.2])
def test_places_that_are_looked_at_together_are_issued_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outside: float
) -> None:
    rewards = {row: (EASY, HARD, FAIR, HARD)[row % 4] for row in range(23)} | {2: HARD, 6: EASY}
    rows = []
    for stretch in (1, 5, 1000):
        monkeypatch.setattr(prompt_order, "STRETCH", stretch)
        rows.append(issued(opened(tmp_path / str(stretch), 23, shuffle=True, outside=outside), 60, rewards))
    assert rows[0] == rows[1] == rows[2]
    assert {rewards[row] for row in rows[0][23:]} == ({FAIR, EASY, HARD} if outside else {FAIR})
