"""Kill every part of a run, one after the other, and see it go on without losing or repeating anything."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, MARK, Drive, Driver
from tests.e2e.verdict import judged

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

EVERY = 4
SETTINGS = [*ENDLESS, f"trainer.checkpoint_every={EVERY}"]


def kill(run: Driver, title: str, number: signal.Signals = signal.SIGKILL) -> None:
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


def until_checkpoint(run: Driver) -> None:
    """Wait until there is one of a step that was taken; how many steps the run takes meanwhile differs by machine."""
    run.until_true(lambda: any((run.folder / "checkpoints").glob("step_[1-9]*/manifest.json")))


def step_in(line: str) -> int:
    """The step that a line of the run ends with."""
    return int(line.split()[-1])


def test_a_run_goes_on_after_the_death_of_each_of_its_parts(drive: Drive) -> None:
    run = drive(SETTINGS)
    until_checkpoint(run)
    kill(run, "ray::TrainerRank")
    again = step_in(run.until("the trainer restarts from step"))
    assert again >= EVERY and again % EVERY == 0
    run.until_step(again + 3)
    kill(run, "ray::Generator")
    run.until("generator-0 is back")
    run.until_step(run.step() + 3)
    kill(run, "VLLM::EngineCore")
    run.until("generator-0 is back")
    run.until_step(run.step() + 3)
    kill(run, "ray::BufferActor")
    run.until_step(run.step() + EVERY + 2)
    run.kill()

    steps = run.step() + 8
    resumed = drive(["--resume", str(run.folder), f"run.max_steps={steps}"])
    resumed.finish()

    (after,) = [step_in(line) for line in resumed.said if "resuming after step" in line]
    assert again < after < steps and after % EVERY == 0
    lines = judged(run.folder, steps)
    # A group that the deaths held up may be staler than the limit: its tokens have no loss then.
    trained = {int(key.split("/")[2]) for line in lines for key in line if key.startswith("policy/by_staleness/")}
    assert 0 < max(trained) <= 4


def test_the_trainer_dies_while_it_waits_for_a_generator_that_died_before_it(drive: Drive) -> None:
    """Ray gives the rank another process, which answers, but has no weights for the generator that comes back."""
    run = drive([*SETTINGS, "run.stall_deadline=240"])
    until_checkpoint(run)
    kill(run, "ray::Generator")
    run.until("it starts again")
    time.sleep(4)  # the engine takes longer to start: the trainer waits for a mini-batch by then
    kill(run, "ray::TrainerRank")
    lost = run.until("the trainer restarts from step")
    assert "the process of trainer-" in lost and "died" in lost
    run.until("generator-0 is back")
    run.until_step(step_in(lost) + 3)
    run.stop()


def test_a_part_that_freezes_is_started_again_like_one_that_died(drive: Drive) -> None:
    deadlines = ["generator.silent_deadline=10", "trainer.collective_deadline=10"]
    run = drive([*SETTINGS, *deadlines])
    until_checkpoint(run)
    kill(run, "ray::TrainerRank", signal.SIGSTOP)
    run.until_step(step_in(run.until("the trainer restarts from step")) + 3)
    kill(run, "ray::Generator", signal.SIGSTOP)
    run.until("no answer of generator-0")
    run.until("generator-0 is back")
    run.until_step(run.step() + 3)
    run.stop()
    lines = run.lines()
    assert [line["trainer/global_step"] for line in lines] == list(range(1, len(lines) + 1))
