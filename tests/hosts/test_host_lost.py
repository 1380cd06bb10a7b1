"""Hosts of each kind are lost, cut off and come back in the middle of runs, which go on or end with the reason.

`-s` prints how long each took to go on.
"""

import json
import time
from collections.abc import Callable, Sequence

import pytest

from service.run.records.timeline import timeline_events
from tests.e2e.verdict import judged
from tests.hosts.bed import Bed, Host
from tests.hosts.conftest import EVERY, Run

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]

Lay = Callable[[Sequence[Host]], Bed]
Drive = Callable[..., Run]

A, B, C, D = Host("a", cpus=0), Host("b"), Host("c"), Host("d")
FIRST = EVERY + 1
"""The step at which the first host is disturbed: there is a checkpoint to go back to."""
PLACED = ["placement.buffer={host: b}", "placement.trainer={host: c}", "placement.generators={host: d}"]
RECOVERY_SECONDS = 240.0
"""On a loaded machine. Ray alone takes 62 s to declare a host dead."""


def test_generators_go_on_elsewhere_when_their_host_is_lost_and_on_that_host_when_it_is_back(
    lay: Lay, drive: Drive
) -> None:
    bed = lay([A, B, C, D])
    bed.start_ray()
    steps = FIRST + 2 * (EVERY + 1) + 1
    placed = ["placement.trainer={host: b}", "placement.generators={host: 'in(c, d)'}"]
    run = drive(bed, [f"run.max_steps={steps}", *placed])
    run.until_step(FIRST)
    lost = run.holder("generator-0")

    def power_cycle() -> None:
        bed.kill(lost)
        bed.boot(lost)
        bed.start_ray(lost)

    run.goes_on_after("a generator's host lost", power_cycle, RECOVERY_SECONDS)
    assert any(f"host {bed.addresses[lost]} is gone; it held generator-0" in line for line in run.said)
    assert any(f"host {bed.addresses[lost]} has joined" in line for line in run.said)
    again = run.holder("generator-0")
    run.goes_on_after("a generator's host lost, another one back", lambda: bed.kill(again), RECOVERY_SECONDS)
    assert lost in (again, run.holder("generator-0")), "the host that came back is used"
    run.finish()
    judged(run.folder, steps)
    assert not any("retries remaining" in line for line in run.said)


def test_links_are_cut_and_the_hosts_of_the_buffer_and_the_ranks_are_lost_and_the_run_goes_on(
    lay: Lay, drive: Drive
) -> None:
    bed = lay([A, B, C, D, Host("e", cpus=2)])
    bed.start_ray("a", "b", "c", "d")
    began = time.time()
    cuts = {"buffer": 5, "trainer-0": 20, "generator-0": 60}
    steps = FIRST + (len(cuts) + 2) * (EVERY + 1) + 1
    # Ray takes a host that is cut off for 62 s for dead, and 60 s can be too long for a generator to stay on its own.
    spare = ["placement.trainer={host: 'in(c, e)'}", "placement.generators={host: 'in(d, e)'}"]
    run = drive(bed, [f"run.max_steps={steps}", *PLACED, *spare])
    run.until("loading the model")  # all have their places: what joins now is a spare
    bed.start_ray("e")
    run.until_step(FIRST)
    held = {part: run.holder(part) for part in ("buffer", "trainer-0", "trainer-1", "generator-0")}
    assert held == {"buffer": "b", "trainer-0": "c", "trainer-1": "c", "generator-0": "d"}
    for part, seconds in cuts.items():

        def cut(host: str = held[part], seconds: int = seconds) -> None:
            bed.cut(host)
            time.sleep(seconds)
            bed.join(host)

        run.goes_on_after(f"the link of {part}'s host cut for {seconds} s", cut, seconds + RECOVERY_SECONDS)
    run.goes_on_after("the buffer's host lost", lambda: bed.kill("b"), RECOVERY_SECONDS)
    run.goes_on_after("the ranks' host lost", lambda: bed.kill("c"), RECOVERY_SECONDS)
    assert any("the trainer restarts from step" in line for line in run.said)
    run.finish()
    judged(run.folder, steps)
    spans = [event for event in map(json.loads, timeline_events(run.folder)) if event["ph"] == "X"]
    assert {span["cat"] for span in spans} >= {"commits", "rank", "engine"}
    for span in spans:
        until = (span["ts"] + span["dur"]) / 1e6
        assert began - 5 < span["ts"] / 1e6 and until < time.time() + 5, f"{span}: clocks are days apart"


def test_a_run_whose_head_is_lost_with_the_buffer_ends_and_goes_on_in_a_new_cluster(lay: Lay, drive: Drive) -> None:
    bed = lay([A, B, C, D])
    bed.start_ray()
    steps = FIRST + EVERY + 3
    run = drive(bed, [f"run.max_steps={steps}", *PLACED, "placement.buffer={host: a}"], host="b")
    run.until_step(FIRST)
    began = time.monotonic()
    bed.kill("a")
    assert run.end() not in (0, None), "a cluster without its control store is no cluster"
    print(f"FIGURE the head lost: {time.monotonic() - began:.0f} s to the end of the run")
    for name in ("b", "c", "d"):
        bed.kill(name)
    for name in bed.hosts:
        bed.boot(name)
    bed.start_ray()
    began = time.monotonic()
    resumed = drive(bed, ["--resume", str(run.folder)], host="b")
    resumed.until(f"/{steps}  reward")
    print(f"FIGURE resumed in a new cluster: {time.monotonic() - began:.0f} s to the next optimizer step")
    resumed.finish()
    judged(run.folder, steps)


def test_where_the_run_folder_cannot_be_written_generators_go_on_and_ranks_end_the_run(lay: Lay, drive: Drive) -> None:
    bed = lay([A, C, D])
    bed.start_ray()
    steps = 6 * EVERY
    run = drive(bed, [f"run.max_steps={steps}", "placement.trainer={host: c}", "placement.generators={host: d}"])
    run.until_step(2)
    run.goes_on_after("the run folder read-only for a generator", lambda: bed.read_only("d"), RECOVERY_SECONDS)
    bed.read_only("c")
    assert run.end() == 1, run.tail()
    assert "Read-only file system" in run.said[-1], "one line says why"
    refused = drive(bed, ["--resume", str(run.folder)])
    assert refused.end() == 2, "nothing starts on a host that cannot write"
    assert "cannot write into the run folder" in refused.said[-1]
    for name in ("c", "d"):
        bed.kill(name)
        bed.boot(name)
        bed.start_ray(name)
    resumed = drive(bed, ["--resume", str(run.folder)])
    resumed.finish()
    judged(run.folder, steps)


def test_a_host_that_joins_late_gets_a_generator_and_one_that_cannot_write_gets_none(lay: Lay, drive: Drive) -> None:
    bed = lay([A, C, D, Host("e", writes=False)])
    bed.start_ray("a", "c")
    # A rank and an engine take half a processor each: the rank and one engine are on c, two have room on d, one on e.
    settings = ["trainer.ranks=1", "placement.trainer={host: c}", "generator.engines={min: 1, max: 4}"]
    run = drive(bed, ["run.max_steps=100000", *settings])
    run.until_step(1)
    bed.start_ray("d")
    run.until(f"host {bed.addresses['d']} has joined")
    bed.start_ray("e")
    run.until("cannot write into the run folder")
    run.until_true(lambda: any(line.startswith("generator-1 has joined") for line in run.said), "a generator on d")
    run.stop()
