"""A run evaluates on one engine while the other and the trainer go on."""

from __future__ import annotations

import signal

import pytest

from service.run.folder import read_lines
from tests.e2e.conftest import ENDLESS, Drive

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

EVERY = 4
SETTINGS = [
    *ENDLESS,
    "trainer.ranks=1",
    "trainer.checkpoint_every=50",
    "generator.engines=2",
    f"data.eval_every={EVERY}",
    "data.eval_make_rows=64",
    "data.eval_mode=beside",
]


def test_training_goes_on_beside_evaluations_whose_numbers_name_their_step(drive: Drive) -> None:
    run = drive(SETTINGS)
    run.until("evaluation after step 0:")
    run.until(f"evaluation after step {EVERY}:")
    run.until_step(3 * EVERY)
    run.until("evaluation after step")
    run.until_step(run.step() + 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.tail()
    evaluated = [line["step"] for line in read_lines(run.folder / "evaluations.jsonl")]
    assert evaluated == sorted(set(evaluated)) and all(step % EVERY == 0 for step in evaluated), run.tail()
    lines = [line for line in read_lines(run.folder / "metrics.jsonl") if "eval/step" in line]
    assert len(lines) >= 2
    assert any(line["trainer/global_step"] > line["eval/step"] for line in lines), "training did not wait"
    assert all(line["eval/lag_intervals"] < 2 for line in lines)
    assert not any("given up" in line or "begins anew" in line or "failed" in line for line in run.said), run.tail()
