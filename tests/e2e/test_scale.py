"""A run grows and shrinks while it trains: generators join, leave, and join again."""

from __future__ import annotations

import re
import signal
import time

import pytest

from actors.generator.generator_pool import HAND_OVER_SECONDS, STOP_SECONDS
from service.cli.parser import main
from tests.e2e.conftest import ENDLESS, Drive
from tests.e2e.ledger_watch import page_of

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

GRACE = 1
GENERATED = re.compile(r'^baton_generated_tokens_total\{[^}]*"generator-1"[^}]*\} [1-9]', re.MULTILINE)
SETTINGS = [
    *ENDLESS,
    "trainer.ranks=1",
    "trainer.checkpoint_every=50",
    "generator.engines={min: 1, max: 2}",
    f"generator.leave_grace={GRACE}",
]


def test_a_run_grows_to_two_generators_shrinks_to_one_and_grows_again_with_its_ledger_closed(drive: Drive) -> None:
    run = drive(SETTINGS)
    joined = run.until("generator-1 has joined")
    began, after_loading = time.monotonic(), float(joined.split(", ")[1].split()[0])
    run.until_true(lambda: GENERATED.search(page_of(run.folder)), "tokens of generator-1")
    seconds = after_loading + time.monotonic() - began
    print(f"generates {seconds:.1f} s after its engine had loaded")
    assert seconds < 15
    run.until_step(run.step() + 1)
    assert main(["scale", str(run.folder), "--engines", "1"]) == 0
    run.until("generator-1 leaves")
    began = time.monotonic()
    run.until("generator-1 has left")
    assert time.monotonic() - began < GRACE + STOP_SECONDS + HAND_OVER_SECONDS / 2, "an update was waited for"
    run.until_step(run.step() + 1)
    assert main(["scale", str(run.folder), "--engines", "2"]) == 0
    run.until("generator-1 has joined")
    run.until_step(run.step() + 1)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.tail()
    assert not any("failed" in line or "did not take" in line for line in run.said)
