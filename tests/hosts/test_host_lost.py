"""A host of each kind is lost in the middle of a run; the run goes on without it, or ends with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from tests.e2e.verdict import judged
from tests.hosts.bed import Bed, Host
from tests.hosts.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1200)]

Lay = Callable[[Sequence[Host]], Bed]
Drive = Callable[..., Run]

FOUR = (Host("a", cpus=0), Host("b"), Host("c"), Host("d"))
STEPS = 24
RANKS_APART = ["placement.trainer={host: c}", "placement.generators={host: d}"]


def test_the_host_of_the_generators_is_lost_and_they_start_again_on_another(lay: Lay, drive: Drive) -> None:
    bed = lay(FOUR)
    bed.start_ray()
    run = drive(
        bed,
        [
            f"run.max_steps={STEPS}",
            "placement.trainer={host: b}",
            "placement.generators={host: 'in(c, d)'}",
        ],
    )
    run.until_step(6)
    lost = run.holder("generator-0")
    bed.kill(lost)
    run.goes_on_within(240, "a generator's host lost")
    assert run.end() == 0, run.tail()
    judged(run.folder, STEPS)
    assert not any("retries remaining" in line for line in run.said)
    assert any(f"host {bed.addresses[lost]} is gone; it held generator-0" in line for line in run.said)


def test_the_host_of_the_buffer_is_lost_and_its_journal_goes_on_on_another(lay: Lay, drive: Drive) -> None:
    bed = lay(FOUR)
    bed.start_ray()
    run = drive(bed, [f"run.max_steps={STEPS}", "placement.buffer={host: b}", *RANKS_APART])
    run.until_step(6)
    assert run.holder("buffer") == "b"
    bed.kill("b")
    run.goes_on_within(240, "the buffer's host lost")
    assert run.end() == 0, run.tail()
    judged(run.folder, STEPS)


def test_the_host_of_the_ranks_is_lost_and_training_goes_on_from_the_newest_checkpoint(lay: Lay, drive: Drive) -> None:
    bed = lay(FOUR)
    bed.start_ray()
    run = drive(
        bed, [f"run.max_steps={STEPS}", "placement.trainer={host: 'in(b, c)'}", "placement.generators={host: d}"]
    )
    run.until_step(6)
    bed.kill(run.holder("trainer-0"))
    run.until("the trainer restarts from step")
    run.goes_on_within(240, "the ranks' host lost")
    assert run.end() == 0, run.tail()
    judged(run.folder, STEPS)


@pytest.mark.parametrize("seconds", [5, 20, 60])
def test_a_link_that_is_cut_for_a_while_costs_nothing_but_time(lay: Lay, drive: Drive, seconds: int) -> None:
    bed = lay(FOUR)
    bed.start_ray()
    settings = [
        f"run.max_steps={STEPS}",
        "placement.trainer={host: 'in(b, c)'}",
        "placement.generators={host: 'in(c, d)'}",
    ]
    run = drive(bed, settings)
    run.until_step(6)
    cut = run.holder("generator-0")
    bed.cut(cut)
    time.sleep(seconds)
    bed.join(cut)
    run.goes_on_within(240, f"a link cut for {seconds} s")
    assert run.end() == 0, run.tail()
    judged(run.folder, STEPS)


def test_a_run_whose_head_is_lost_ends_and_goes_on_in_a_new_cluster(lay: Lay, drive: Drive) -> None:
    bed = lay(FOUR)
    bed.start_ray()
    run = drive(
        bed, [f"run.max_steps={STEPS}", "placement.trainer={host: c}", "placement.generators={host: d}"], host="b"
    )
    run.until_step(6)
    bed.kill("a")
    assert run.end() not in (0, None), "a cluster without its control store is no cluster"
    for name in ("b", "c", "d"):
        bed.kill(name)
    for name in bed.hosts:
        bed.boot(name)
    bed.start_ray()
    resumed = drive(bed, ["--resume", str(run.folder)], host="b")
    assert resumed.end() == 0, resumed.tail()
    judged(run.folder, STEPS)


def test_a_host_that_joins_late_gets_a_generator_and_one_that_cannot_write_gets_none(lay: Lay, drive: Drive) -> None:
    bed = lay([*FOUR, Host("e", writes=False)])
    bed.start_ray("a", "b", "c")
    settings = [
        "placement.trainer={host: b}",
        "placement.generators={host: '!b'}",
        "generator.engines={min: 1, max: 3}",
    ]
    run = drive(bed, [f"run.max_steps={2 * STEPS}", *settings, "generator.tensor_parallel_size=1"])
    run.until_step(4)
    bed.start_ray("d")
    run.until(f"host {bed.addresses['d']} has joined")
    bed.start_ray("e")
    run.until("cannot write into the run folder")
    assert run.end() == 0, run.tail()
    judged(run.folder, 2 * STEPS)
