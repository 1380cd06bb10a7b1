"""A finished run goes on: with more steps, on other numbers of ranks and engines, and never without its journal."""

from __future__ import annotations

import json

import pytest

from service.config import load
from service.config.core_settings import batch_settings, message_limits
from tests.e2e.conftest import QUICK, Drive
from tests.recorded import replayed

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

SETTINGS = [*QUICK, "run.max_steps=6", "trainer.checkpoint_every=3"]


def test_a_finished_run_goes_on_longer_with_other_ranks_and_engines_and_its_own_journal(drive: Drive) -> None:
    first = drive(SETTINGS)
    first.finish()
    folder = first.folder
    again = ["--resume", str(folder), "run.max_steps=8", "trainer.ranks=1", "generator.engines=2"]

    (folder / "journal").rename(folder / "elsewhere")
    without = drive(again)
    assert without.end() == 2
    assert "the journal ends at position" in without.said[-1] and "step 6" in without.said[-1]
    for file in (folder / "journal").iterdir():
        file.unlink()
    (folder / "journal").rmdir()
    (folder / "elsewhere").rename(folder / "journal")

    resumed = drive(again)
    resumed.finish()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["trainer/global_step"] for line in lines] == list(range(1, 9))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tokens"]["open"] == summary["tokens"]["stepped"] == 0
    assert sum(summary["lengths"]["trained"]) == 8 * 16 * 8

    config = load([folder / "config.yaml"]).config
    for step in (2, 7):
        batch = replayed(message_limits(config), batch_settings(config), folder / "journal", step)
        assert len(batch.groups) == 16
        assert batch.metrics["reward/avg_raw_reward"] == pytest.approx(lines[step - 1]["reward/avg_raw_reward"])
