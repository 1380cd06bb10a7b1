"""`deploy/slurm/train.sbatch` on a real Slurm: jobs are requeued, reach their time limit, lose nodes and are ended.

`-s` prints how long each took. The commands that the page has are taken from it.
"""

import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.ledger_watch import LedgerWatch
from tests.e2e.verdict import judged, step_of
from tests.hosts.bed import ROOT, Bed, Host
from tests.hosts.conftest import EVERY, SETTINGS
from tests.hosts.slurm import Slurm, no_slurm
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]

PAGE = (ROOT / "docs" / "slurm.md").read_text()
NODES = [f"bed{os.getpid()}n{number}" for number in (1, 2, 3)]
"""Slurm's cgroups on this machine have the names of its nodes."""
WAIT_SECONDS = 900
"""For what a job does next; starting takes minutes on a loaded machine."""
FIRST = EVERY + 1
"""The step at which a job is disturbed: there is a checkpoint to go back to, and a step after it."""
STEPS = 3 * EVERY + 2


def command(begin: str, **names: str) -> list[str]:
    """The words of the only command of the page that begins so, with other words in the place of the page's."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    (line,) = [line.split(" #")[0].strip() for line in lines if line.startswith(begin)]
    for name, own in names.items():
        line = line.replace({"job": "4711", "config": "mine.yaml"}[name], own)
    return shlex.split(line)


@dataclass
class Job:
    """A job that was submitted."""

    slurm: Slurm
    number: str
    folder: Path
    """Of its run."""
    output: Path
    watches: list[LedgerWatch] = field(default_factory=list)

    def said(self) -> str:
        """Its output up to now."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def step(self) -> int:
        """The optimizer step that was taken last."""
        return step_of(self.folder)

    def until(self, look: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        """Wait for something while the job goes on."""
        until(look, seconds, lambda: self.said() + self.slurm.call("squeue"), pause=0.5)

    def until_started(self, times: int) -> str:
        """Wait until it was started so many times; returns its first node, whose metrics are watched."""
        self.until(lambda: self.said().count("Running command on head node") == times)
        head = self.slurm.shown(self.number, "BatchHost")
        self.watches.append(LedgerWatch(self.folder, partial(self.slurm.bed.enter_network, head)))
        return head

    def until_stepped(self) -> None:
        """Wait for its next optimizer step."""
        before = self.step()
        self.until(lambda: self.step() > before)

    def end(self) -> str:
        """Wait until it has ended and none of its processes is left; its state."""
        done = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.slurm.shown(self.number, "JobState") in done)
        self.until(lambda: self.number not in self.slurm.call("squeue", "--noheader", "--format=%i").split(), 120)
        for node in self.slurm.nodes:
            if node in self.slurm.bed._holders:
                self.slurm.bed.call(node, "test $(ls /proc | grep -c '^[0-9]') -lt 8")
        return self.slurm.shown(self.number, "JobState")


Submit = Callable[..., Job]


@pytest.fixture
def submit() -> Iterator[Submit]:
    """Submits a quick start as the page does, to a Slurm of three nodes, on two of them."""
    if (why := no_slurm()) is not None:
        pytest.skip(why)
    (ROOT / "build").mkdir(exist_ok=True)
    # Not in /tmp, of which each node has its own.
    shared = Path(tempfile.mkdtemp(prefix="slurm-", dir=ROOT / "build"))
    jobs: list[Job] = []
    with ExitStack() as held:
        held.callback(shutil.rmtree, shared, ignore_errors=True)
        bed = held.enter_context(Bed(shared, [Host("ctl", cpus=0), *map(Host, NODES)]))
        slurm = held.enter_context(Slurm(bed, shared / "slurm"))

        def start(*settings: str, go_on: Job | None = None) -> Job:
            own = {"config": "configs/quickstart.yaml"}
            words = command("sbatch --nodes", **own)
            if go_on is not None:
                words = command("sbatch --export", job=go_on.number, **own)
            words = ["2" if word == "4" else word for word in words[1:] if not word.startswith("--gpus")]
            here = [f"{ROOT / word}" if (ROOT / word).is_file() else word for word in words]
            options = ["--parsable", f"--chdir={shared}", f"--output={shared}/%j.txt"]
            number = slurm.call("sbatch", *options, *here, *SETTINGS, *settings).split()[-1]
            folder = shared / "runs" / f"train-{number}" if go_on is None else go_on.folder
            jobs.append(Job(slurm, number, folder, shared / f"{number}.txt"))
            return jobs[-1]

        yield start
        for job in jobs:
            print(job.said())
            for watch in job.watches:
                watch.stop()
    for job in jobs:
        assert [(watch.open, watch.lost) for watch in job.watches] == [([], []) for _ in job.watches], "the ledger"
        assert any(watch.scrapes for watch in job.watches)


def test_a_job_trains_with_one_command_is_requeued_in_the_middle_and_no_step_is_lost_or_doubled(submit: Submit) -> None:
    began = time.monotonic()
    job = submit(f"run.max_steps={STEPS}")
    job.until_started(1)
    job.until(lambda: job.step() >= 1)
    print(f"FIGURE one command to the first step: {time.monotonic() - began:.0f} s")
    token = token_of(job)
    lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert len(token) == 64 and not any(token in line for line in lines), "the token is in no command line"
    files = [file for file in job.output.parent.rglob("*") if file.is_file() and not file.is_symlink()]
    assert [file for file in files if token in file.read_bytes()] == [], "the token is in no file"
    shown = command("srun ", job=job.number)
    words = [str(job.folder) if word.startswith("runs/") else word for word in shown]
    assert "generators 1 of 1 up" in job.slurm.call(*words)
    job.until(lambda: job.step() >= FIRST)
    job.slurm.call(*command("scontrol requeue", job=job.number))
    job.until_started(2)
    job.until_stepped()
    assert job.end() == "COMPLETED"
    judged(job.folder, STEPS)
    assert (job.folder / "final" / "config.json").is_file()


def token_of(job: Job) -> bytes:
    """The token of the job's cluster, from the environment of a process of its run."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(job.folder).encode() in (process / "cmdline").read_bytes():
                words = (process / "environ").read_bytes().split(b"\0")
                return next(word for word in words if word.startswith(b"RAY_AUTH_TOKEN=")).partition(b"=")[2]
        except OSError:
            continue
    raise AssertionError("no process of the run")


def test_near_the_time_limit_a_job_stops_in_order_and_goes_on_and_another_job_continues_the_run_of_one_that_was_ended(
    submit: Submit,
) -> None:
    job = submit("run.max_steps=100000")
    job.until_started(1)
    job.until(lambda: job.step() >= FIRST)
    elapsed = int(job.slurm.call("squeue", "--noheader", "--format=%M").split(":")[0])
    job.slurm.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={elapsed + 12}")
    job.until(lambda: "the time limit is near" in job.said())
    stopped = job.step()
    assert f"goes on from {job.folder}/checkpoints/step_{stopped}/manifest.json" in job.said(), "the newest step's"
    job.until(lambda: job.slurm.shown(job.number, "JobState") == "PENDING")
    job.slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=UNLIMITED")
    job.until_started(2)
    job.until(lambda: f"resuming after step {stopped}" in job.said())
    job.until_stepped()
    shutil.rmtree(job.folder / "final")
    job.slurm.call(*command("scancel --batch", job=job.number))
    assert job.end() == "FAILED", "its exit code is that of `baton run`"
    assert (job.folder / "final" / "config.json").is_file(), "the final weights"
    steps = job.step() + EVERY
    last = submit(f"run.max_steps={steps}", go_on=job)
    last.until_started(1)
    assert last.end() == "COMPLETED"
    judged(job.folder, steps)


@pytest.mark.parametrize("lost", ["the second node", "the first node"])
def test_a_job_that_loses_a_node_goes_on_on_another_one(lost: str, submit: Submit) -> None:
    job = submit(f"run.max_steps={STEPS}", "trainer.ranks=2")
    head = job.until_started(1)
    job.until(lambda: job.step() >= FIRST)
    node = head if lost == "the first node" else next(word for word in NODES[:2] if word != head)
    job.slurm.bed.kill(node)
    job.until_started(2)
    assert node not in job.slurm.call("scontrol", "show", "hostnames", job.slurm.shown(job.number, "NodeList")).split()
    job.until_stepped()
    assert job.end() == "COMPLETED"
    judged(job.folder, STEPS)
