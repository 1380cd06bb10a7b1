"""Two things die at once: every pair, at every moment of a run, in virtual time; see pair_world.py."""

from pathlib import Path

import pytest

from actors.buffer.actor import BufferActor
from service.run.liveness.supervisor import SILENT_SECONDS
from tests.sim import pair_world
from tests.sim.made_parts import SimLearner
from tests.sim.pair_world import STEPS, PairWorld, pair_config, run_pair
from tests.sim.pairs import NAMING_SECONDS, OUTSIDE, VICTIMS, pairs_of

PARTS = 11
"""No divisor of the pairs of a victim: each part has every two victims, and each first one at each moment and delay."""
CHANGE_PARTS = 10


def test_a_run_in_which_nothing_dies_finishes_and_says_so(tmp_path: Path) -> None:
    told = PairWorld(tmp_path).run()
    assert (told.wrong(), told.deaths) == ([], [])
    assert 15 < told.seconds < 60 and len(told.progress) == STEPS


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, PARTS))])
def test_a_run_goes_on_whatever_dies_with_or_after(part: int, tmp_path: Path) -> None:
    wrong, named = dict[str, list[str]](), list[float]()
    for pair in [pair for first in VICTIMS for pair in pairs_of(first)][part::PARTS]:
        told = run_pair(pair, tmp_path)
        if found := told.wrong():
            wrong[str(pair)] = found
        named += [seconds for _, seconds in told.naming()]
    assert wrong == {}
    named.sort()
    assert len(named) >= 150 and named[int(0.99 * len(named))] < NAMING_SECONDS


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint takes 40 s: longer than a stall may take, and than all steps."""
    monkeypatch.setattr(SimLearner, "SAVE_BYTES", 200e6)
    monkeypatch.setattr(SimLearner, "DISK_RATE", 5e6)
    config = pair_config()
    short = config.model_copy(update={"run": config.run.model_copy(update={"stall_deadline": 20.0})})
    monkeypatch.setattr(pair_world, "pair_config", lambda engines: short)


def test_a_slow_disk_delays_checkpoints_and_no_step(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    on_fast_disk = PairWorld(tmp_path, [], "start").run()
    request.getfixturevalue("slow_disk")
    told = PairWorld(tmp_path, [], "start").run()
    assert (told.wrong(), told.deaths) == ([], [])
    assert told.progress == pytest.approx(on_fast_disk.progress, rel=0.05)
    assert told.seconds > on_fast_disk.seconds + 40.0
    assert not any("restart" in line for _, line in told.said)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 20.0, 39.0, 41.0, 60.0])
@pytest.mark.usefixtures("slow_disk")
def test_a_rank_that_dies_while_a_slow_disk_writes_goes_on_from_the_newest_checkpoint(
    seconds: float, tmp_path: Path
) -> None:
    told = PairWorld(tmp_path, [("trainer-0", seconds)], "checkpoint").run()
    assert (told.broken, told.ended) == ([], "finished") and len(told.deaths) == 1
    restarts = [line for _, line in told.said if "the trainer restarts from step" in line]
    assert len(restarts) == 1 and restarts[0].endswith(f"step {0 if seconds < 40 else 1}")


@pytest.mark.parametrize("victim", [victim for victim in VICTIMS if victim not in (*OUTSIDE, "engine")])
def test_an_actor_that_stands_still_is_named_because_the_supervisor_asks_it(victim: str, tmp_path: Path) -> None:
    """Who is not asked is named later, by what waits for it. The run waits for its agents meanwhile."""
    deaths = [(victim, 0.0), ("agent worker", 0.0)]
    (named,) = PairWorld(tmp_path, deaths, "lease", stops=True).run().naming()
    assert named[1] < SILENT_SECONDS + NAMING_SECONDS


def test_a_trainer_that_is_lost_while_engines_start_restarts_at_once(tmp_path: Path) -> None:
    said = PairWorld(tmp_path, [("trainer-0", -1.0)], "start").run().said
    restarts, all_up = (next(at for at, line in said if words in line) for words in ("restarts from", "status page"))
    assert restarts < all_up - 1.0


def test_six_cuts_of_the_connection_at_the_end_are_each_named(tmp_path: Path) -> None:
    cuts = [("connection", at) for at in (1.5, 2.0, 3.3, 12.4, 15.3, 22.6)]
    assert PairWorld(tmp_path, cuts, "end").run().wrong() == []


def broken(folder: Path, changes: range) -> dict[int, list[str]]:
    """What is wrong with runs whose buffer dies, and its disk loses power, at these changes of the disk."""
    told = {change: PairWorld(folder, last_change=change).run().wrong() for change in changes}
    return {change: wrong for change, wrong in told.items() if wrong}


@pytest.mark.parametrize(
    "part", [1, *(pytest.param(part, marks=pytest.mark.full) for part in range(2, CHANGE_PARTS + 1))]
)
def test_a_buffer_that_dies_at_any_change_of_its_disk_has_all_that_it_acknowledged(part: int, tmp_path: Path) -> None:
    whole = PairWorld(tmp_path)
    whole.run()
    assert whole.changes > 100 and len(whole.disk.files) > 1
    assert broken(tmp_path, range(part, whole.changes + 1, CHANGE_PARTS)) == {}


def test_a_buffer_that_acknowledges_before_the_sync_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def settled(self: BufferActor) -> None:
        self._queued.set()

    monkeypatch.setattr(BufferActor, "_settled", settled)
    monkeypatch.setattr(BufferActor, "_sync_seconds", 0.3)
    assert "was acknowledged and is gone" in str(broken(tmp_path, range(44, 60, 2)))
