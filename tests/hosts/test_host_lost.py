"""A host of each kind is lost in the middle of a run; the run goes on without it, or ends with the reason."""

from __future__ import annotations

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
