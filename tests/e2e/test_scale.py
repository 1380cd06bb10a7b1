"""A run grows while it trains: a generator joins."""

from __future__ import annotations

import re
import time

import pytest

from tests.e2e.conftest import ENDLESS, Drive
from tests.e2e.ledger_watch import page_of

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

GENERATED = re.compile(r'^baton_generated_tokens_total\{[^}]*"generator-1"[^}]*\} [1-9]', re.MULTILINE)
SETTINGS = [
    *ENDLESS,
    "trainer.ranks=1",
    "trainer.checkpoint_every=50",
    "generator.engines={min: 1, max: 2}",
]


def test_a_generator_joins_a_run_as_soon_as_there_is_room_and_generates(drive: Drive) -> None:
    run = drive(SETTINGS)
    joined = run.until("generator-1 has joined")
    began, after_loading = time.monotonic(), float(joined.split(", ")[1].split()[0])
    run.until_true(lambda: GENERATED.search(page_of(run.folder)), "tokens of generator-1")
    seconds = after_loading + time.monotonic() - began
    print(f"generates {seconds:.1f} s after its engine had loaded")
    assert seconds < 15
    run.until_step(run.step() + 1)
    run.stop()
    assert not any("failed" in line or "did not take" in line for line in run.said)
