"""Processes that stand still, messages that are lost, and a disk that is full."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.theatre import SEED, Play, settings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

Stage = Callable[[str], Play]

RPC_FAILURES = {
    "CoreWorkerService.grpc_client.PushTask": {
        "num_failures": -1,
        "req_failure_prob": 5,
        "resp_failure_prob": 5,
        "in_flight_failure_prob": 5,
    }
}
"""Of Ray's calls of actors, in percent: the request is lost, the answer, or the connection in between."""


def test_whoever_stands_still_and_goes_on_changes_nothing(staged: Stage) -> None:
    told = settings(lookahead=2, steps=100_000, step_deadline=3.0, lease_deadline=2.0)
    play = staged(f"seed-{SEED}").tell(told, generators=2, turn_seconds=0.01, step_seconds=0.05, concurrency=4).start()
    play.until_step(3)
    rng = random.Random(SEED)
    for role, seconds in [("generator-0", 6.0), ("trainer", 5.0), ("buffer", 4.0), ("generator-1", 5.0)]:
        play.freeze(role, seconds + rng.random())
        play.until_step(play.step() + 3)
    play.stop()
    report = play.ended(300)
    assert report["status"]["restarts"].get("silent"), "work of a frozen generator went to another attempt"


def test_calls_that_ray_loses_are_made_again_and_count_once(staged: Stage) -> None:
    told = settings(lookahead=2, steps=150)
    play = staged(f"seed-{SEED}").tell(told, generators=3)
    play.start(RAY_testing_rpc_failure=json.dumps(RPC_FAILURES))
    report = play.ended(400)
    slow = report["ack_seconds"]
    play.figures["submits under RPC failures"] += len(slow)
    print(f"{len(slow)} submits, p99 {slow[int(0.99 * len(slow))]:.2f} s, longest {slow[-1]:.2f} s")
    assert len(slow) > 500
    assert slow[-1] < 8.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False, timeout=10
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


SOME_BYTES = 1 << 18
"""Room for a few steps."""


def fill(disk: Path) -> None:
    """Take all the room that is left, also what the journal gives up."""
    with (disk / "ballast").open("ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def give_back(disk: Path, n_bytes: int) -> None:
    """Let go of some of what `fill` took."""
    with (disk / "ballast").open("ab") as file:
        file.truncate(max(file.tell() - n_bytes, 0))


def test_a_full_disk_stops_new_work_and_loses_nothing(staged: Stage, small_disk: Path) -> None:
    play = staged(f"seed-{SEED}").tell(settings(steps=100_000), step_seconds=0.02, journal=str(small_disk / "journal"))
    waits = play.folder / "waits.txt"

    def waited() -> bool:
        """Whether claims, or all that happened, waited for the disk since it was asked last."""
        said = waits.read_text()
        waits.write_text("")
        return " disk\n" in said

    def starved() -> bool:
        fill(small_disk)
        return waited()

    def goes_on(goal: int) -> bool:
        if waited():
            give_back(small_disk, SOME_BYTES)
        return play.step() >= goal

    # Less is left than the journal would like to reserve at once: what it has beyond its need would be used up first.
    fill(small_disk)
    give_back(small_disk, 3 << 19)
    play.start()
    play.until_step(3)
    for kills in (False, True, True):
        waits.write_text("")
        play.until(starved)
        if kills:
            play.kill("buffer")
            fill(small_disk)
            play.until(starved)
        goal = play.step() + 4
        play.until(partial(goes_on, goal))
    play.stop()
    play.ended(300)
