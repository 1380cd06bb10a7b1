"""`baton slurm` on a real Slurm: jobs are requeued, reach their time limit, lose nodes and are cancelled.

`-s` prints how long each took. The commands that the page has are taken from it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
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
from tests.hosts.conftest import EVERY, SETTINGS, holder
from tests.hosts.slurm import KILL_WAIT_SECONDS, Slurm, no_slurm
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
    """The words of the only command of the page that begins so, with other names in the place of the page's."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    (line,) = [line.split(" #")[0].strip() for line in lines if line.startswith(begin)]
    for name, own in names.items():
        line = line.replace({"job": "4711", "runs": "runs/", "config": "mine.yaml", "name": "mine-"}[name], own)
    return [sys.executable, "-m", "service", *words[1:]] if (words := shlex.split(line))[0] == "baton" else words


@dataclass
class Job:
    """A job that was submitted."""

    slurm: Slurm
    number: str
    folder: Path
    """Of its run."""
    watches: list[LedgerWatch] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder.parent

    def said(self) -> str:
        """Its output up to now."""
        file = self.runs / "slurm" / f"{self.number}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def step(self) -> int:
        """The optimizer step that was taken last."""
        return step_of(self.folder)

    def until(self, look: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
        """Wait for something while the job goes on."""
        until(look, seconds, lambda: self.said() + self.slurm.call("squeue"), pause=0.5)

    def starts(self) -> list[str]:
        """The line of each start."""
        return [line for line in self.said().splitlines() if f"job {self.number}, start " in line]

    def until_started(self, times: int) -> str:
        """Wait until it was started so many times; returns the node of Ray's head, whose metrics are watched."""
        self.until(lambda: len(self.starts()) == times)
        head = self.starts()[-1].partition(" on ")[2].split(";")[0].split()[0]
        self.watches.append(LedgerWatch(self.folder, partial(self.slurm.bed.enter_network, head)))
        return head

    def holder(self, part: str) -> str:
        """The node that holds a part, as the run said last."""
        return holder(self.said().splitlines(), part, self.slurm.bed)

    def end(self) -> str:
        """Wait until it has ended and none of its processes is left; its state."""
        done = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.slurm.state(self.number) in done)
        self.until(lambda: self.number not in self.slurm.call("squeue", "--noheader", "--format=%i").split(), 120)
        for node in self.slurm.nodes:
            if node in self.slurm.bed._holders:
                self.slurm.bed.call(node, "test $(ls /proc | grep -c '^[0-9]') -lt 8; ! ls -d /tmp/baton-* 2>/dev/null")
        return self.slurm.state(self.number)


Submit = Callable[..., Job]


@pytest.fixture
def submit() -> Iterator[Submit]:
    """Submits a quick start as the page does, to a Slurm of three nodes with these options of sbatch."""
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

        def start(options: list[str], *settings: str, resume: Job | None = None) -> Job:
            if resume is None:
                begin = command("baton slurm --config mine.yaml -- --nodes 4", config="configs/quickstart.yaml")
                settings = (f"run.dir={shared / 'runs'}", *SETTINGS, *settings)
            else:
                begin = command("baton slurm --resume", job=resume.number, runs=f"{resume.runs}/", name="quickstart-")
            said = slurm.call(*begin[: begin.index("--")], *settings, "--", *options).splitlines()[0]
            number, _, folder = said.removeprefix("submitted job ").partition(": run folder ")
            jobs.append(Job(slurm, number, Path(folder)))
            return jobs[-1]

        yield start
        for job in jobs:
            print(job.said())
            for watch in job.watches:
                watch.stop()
    for job in jobs:
        assert [(watch.open, watch.lost) for watch in job.watches] == [([], []) for _ in job.watches], "the ledger"
        assert any(watch.scrapes for watch in job.watches)


def token_of(job: Job) -> bytes:
    """The token of the job's cluster, from the environment of a process of its run."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(job.folder).encode() in (process / "environ").read_bytes():
                words = (process / "environ").read_bytes().split(b"\0")
                return next(word for word in words if word.startswith(b"RAY_AUTH_TOKEN=")).partition(b"=")[2]
        except OSError:
            continue
    raise AssertionError("no process of the run")


def test_a_job_trains_with_one_command_is_requeued_in_the_middle_and_no_step_is_lost_or_doubled(submit: Submit) -> None:
    began = time.monotonic()
    job = submit(["--nodes", "2", "--partition", "main"], f"run.max_steps={STEPS}")
    job.until_started(1)
    job.until(lambda: job.step() >= 1)
    print(f"FIGURE one command to the first step: {time.monotonic() - began:.0f} s")
    token = token_of(job)
    assert len(token) == 64
    lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not any(token in line for line in lines), "the token is in no command line"
    files = [file for file in job.runs.parent.rglob("*") if file.is_file() and not file.is_symlink()]
    assert [file for file in files if token in file.read_bytes()] == [], "the token is in no file"
    names = {"job": job.number, "runs": f"{job.runs}/", "name": "quickstart-"}
    assert "generators 1 of 1 up" in job.slurm.call(*command("srun ", **names))
    job.until(lambda: job.step() >= FIRST)
    began = time.monotonic()
    job.slurm.call(*command("scontrol requeue", job=job.number))
    job.until_started(2)
    after = job.step()
    job.until(lambda: job.step() > after)
    print(f"FIGURE requeued: {time.monotonic() - began:.0f} s to the next optimizer step")
    assert job.end() == "COMPLETED"
    judged(job.folder, STEPS)
    assert (job.folder / "logs" / f"node-{NODES[0]}.log").read_text() and (
        job.folder / "final" / "config.json"
    ).is_file()


def test_near_the_time_limit_a_job_stops_in_order_and_goes_on_and_scancel_ends_it_and_a_new_job_resumes(
    submit: Submit,
) -> None:
    job = submit(["--nodes=2"], "run.max_steps=100000", "run.stop_grace=60")
    job.until_started(1)
    job.until(lambda: job.step() >= FIRST)
    elapsed = int(job.slurm.call("squeue", "--noheader", "--format=%M").split(":")[0])
    job.slurm.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={elapsed + 2}")
    job.until(lambda: "the time limit is near" in job.said())
    stopped = job.step()
    assert f"goes on from {job.folder}/checkpoints/step_{stopped}/manifest.json" in job.said(), "the newest step's"
    job.until(lambda: job.slurm.state(job.number) == "PENDING")
    job.slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=UNLIMITED")
    job.until_started(2)
    job.until(lambda: f"resuming after step {stopped}" in job.said())
    assert ends(job, "scancel --batch") == "FAILED", "its exit code is that of `baton run`"
    again = submit(["--nodes=2"], resume=job)
    assert again.folder == job.folder
    again.until_started(1)
    assert ends(again, "scancel 4711") == "CANCELLED"
    steps = job.step() + EVERY
    last = submit(["--nodes=2"], f"run.max_steps={steps}", resume=job)
    last.until_started(1)
    assert last.end() == "COMPLETED"
    judged(job.folder, steps)


def ends(job: Job, how: str) -> str:
    """End a job after its next step by a command of the page; its state. Its final weights are there then."""
    before = job.step()
    job.until(lambda: job.step() > before)
    shutil.rmtree(job.folder / "final", ignore_errors=True)
    began = time.monotonic()
    job.slurm.call(*command(how, job=job.number))
    state = job.end()
    print(f"FIGURE {how}: {time.monotonic() - began:.0f} s until nothing is left (KillWait {KILL_WAIT_SECONDS} s)")
    assert (job.folder / "final" / "config.json").is_file(), "the final weights"
    return state


@pytest.mark.parametrize("lost", ["the second node", "the first node"])
def test_a_node_that_the_run_needs_is_lost_and_another_one_takes_its_place(lost: str, submit: Submit) -> None:
    # Two ranks and an engine, half a processor each: what was on one node has no room on the other one.
    deadlines = ["trainer.start_deadline=90", "run.stall_deadline=150"]
    job = submit(["--nodes=2"], f"run.max_steps={STEPS}", "trainer.ranks=2", *deadlines)
    head = job.until_started(1)
    job.until(lambda: job.step() >= FIRST)
    node = head if lost == "the first node" else next(word for word in NODES[:2] if word != head)
    assert node in (job.holder("trainer-0"), job.holder("generator-0"))
    began = time.monotonic()
    job.slurm.bed.kill(node)
    job.until_started(2)
    assert node not in job.starts()[-1].replace(";", " ").split()
    after = job.step()
    job.until(lambda: job.step() > after)
    print(f"FIGURE {lost} lost: {time.monotonic() - began:.0f} s to the next optimizer step")
    assert job.end() == "COMPLETED"
    judged(job.folder, STEPS)


def test_a_run_goes_on_without_a_lost_node_of_generators(submit: Submit) -> None:
    steps = STEPS + EVERY
    # A node has room for two parts: wherever Ray puts the five, each node has one, and one of them only engines.
    job = submit(["--nodes=3"], f"run.max_steps={steps}", "trainer.ranks=1", "generator.engines=4")
    head = job.until_started(1)
    job.until(lambda: job.step() >= FIRST)
    engines = {job.holder(f"generator-{number}") for number in range(4)}
    node = min(engines - {head, job.holder("trainer-0")})
    began = time.monotonic()
    job.slurm.bed.kill(node)
    job.until(lambda: f"host {job.slurm.bed.addresses[node]} is gone" in job.said())
    after = job.step()
    job.until(lambda: job.step() > after)
    print(f"FIGURE a generator's node lost: {time.monotonic() - began:.0f} s to the next optimizer step")
    assert job.end() == "COMPLETED" and len(job.starts()) == 1
    judged(job.folder, steps)


def test_a_heterogeneous_job_has_ranks_and_generators_on_nodes_of_their_own_and_replaces_a_lost_one(
    submit: Submit,
) -> None:
    job = submit(["--nodes=1", ":", "--nodes=1"], f"run.max_steps={STEPS}", "trainer.ranks=1")
    head = job.until_started(1)
    job.until(lambda: job.step() >= FIRST)
    assert job.holder("trainer-0") == head != job.holder("generator-0")
    job.slurm.bed.kill(job.holder("generator-0"))
    job.until_started(2)
    assert job.end() == "COMPLETED"
    assert job.holder("trainer-0") == head != job.holder("generator-0")
    judged(job.folder, STEPS)
