"""Two things die at once: every pair, at every moment of a run, in virtual time; see pair_world.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.pair_world import Pair, PairWorld, run_pair


def test_a_run_in_which_nothing_dies_finishes_and_says_so(tmp_path: Path) -> None:
    told = PairWorld(tmp_path, [], "start").run()
    assert (told.ended, told.broken, told.deaths) == ("finished", [], [])
    assert 20 < told.seconds < 60 and len(told.progress) == 5


@pytest.mark.parametrize("rank", ["trainer-0", "trainer-1"])
def test_an_idle_rank_that_dies_while_a_generator_restarts_holds_nothing_up(tmp_path: Path, rank: str) -> None:
    told = run_pair(Pair("generator-0", rank, "lease", 4.0), tmp_path)
    assert (told.ended, told.broken) == ("finished", [])


def test_a_rank_that_dies_in_a_step_is_restarted_while_the_buffer_reads_its_journal(tmp_path: Path) -> None:
    told = run_pair(Pair("buffer", "trainer-0", "step", 1.0), tmp_path)
    assert (told.ended, told.broken) == ("finished", [])
    assert [who for _, who in told.deaths] == ["buffer", "trainer-0"] and told.silence() < 30
