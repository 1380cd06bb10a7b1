"""Kill every part of a run, one after the other, and see it go on without losing or repeating anything."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

STEPS = 24
SETTINGS = [f"run.max_steps={STEPS}", "trainer.checkpoint_every=4", "model.warm_start.steps=10", "metrics.port=0"]
MARK = "BATON_TEST_RUN"

Drive = Callable[[list[str]], Any]
"""Starts a run; see the fixture `drive`."""


def kill(run: Any, title: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal, SIGKILL, to the first process of the run whose title contains the words."""
    for entry in sorted(Path("/proc").iterdir()):
        if entry.name.isdigit() and belongs(entry, run.mark, title):
            os.kill(int(entry.name), number)
            return
    raise AssertionError(f"the run has no process {title!r}")


def belongs(entry: Path, mark: str, title: str) -> bool:
    try:
        marked = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
        return marked and title.encode() in (entry / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_run_goes_on_after_the_death_of_each_of_its_parts(drive: Drive) -> None:
    run = drive(SETTINGS)
    run.until("step    6/24")
    kill(run, "ray::TrainerRank")
    run.until("the trainer starts again from step 4")
    run.until("step    9/24")
    kill(run, "ray::Generator")
    run.until("generator-0 is back")
    run.until("step   12/24")
    kill(run, "VLLM::EngineCore")
    run.until("generator-0 is back")
    run.until("step   15/24")
    kill(run, "ray::BufferActor")
    run.until("step   18/24")
    run.process.kill()
    run.process.wait(timeout=10)

    resumed = drive(["--resume", str(run.folder)])
    assert resumed.end(240) == 0, "".join(run.said + resumed.said)

    assert any("resuming after step 16" in line for line in resumed.said), "".join(resumed.said)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["trainer/global_step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["trainer/epoch"] for line in lines] == sorted(line["trainer/epoch"] for line in lines)
    assert all(line["async/staleness_max"] <= 4 for line in lines)
    tokens = json.loads((run.folder / "summary.json").read_text())["tokens"]
    assert tokens["open"] == tokens["stepped"] == tokens["rolled_back"] == 0
    trained = sum(line["tokens/loss"] for line in lines)
    assert tokens["trained"] == trained > 0


@pytest.mark.full
def test_a_part_that_freezes_is_started_again_like_one_that_died(drive: Drive) -> None:
    deadlines = ["generator.silent_deadline=10", "trainer.collective_deadline=10"]
    run = drive([*SETTINGS, *deadlines])
    run.until("step    6/24")
    kill(run, "ray::TrainerRank", signal.SIGSTOP)
    run.until("the trainer starts again from step 4")
    run.until("step    9/24")
    kill(run, "ray::Generator", signal.SIGSTOP)
    run.until("no answer of generator-0 for 10 s")
    run.until("generator-0 is back")
    assert run.end(240) == 0, "".join(run.said)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["trainer/global_step"] for line in lines] == list(range(1, STEPS + 1))
