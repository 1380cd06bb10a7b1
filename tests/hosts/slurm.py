"""A real Slurm on the hosts of a bed: the first host has the controller, each other one is a node.

Munge's key, Slurm's state and logs lie in a folder that the hosts share. Slurm tracks processes by cgroups, as it does
unless a site has changed that: `scancel` then sends SIGTERM to the first process of each task only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from actors import RAY_ENV
from tests.hosts.bed import Bed, Process, unsupported
from tests.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
FREEZER = Path("/sys/fs/cgroup/freezer")
CONF = """\
ClusterName=bed
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credentials}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout={silent}
SchedulerParameters=sched_interval=2,bf_interval=2
"""
NODE = "NodeName={name} NodeAddr={address} NodeHostname={name} CPUs={cpus} RealMemory=4000 State=UNKNOWN\n"
PARTITION = "PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP\n"
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
SILENT_SECONDS = 30
"""After which Slurm takes a node for dead."""
CREDENTIAL_SECONDS = 20
"""Slurm starts a requeued job no earlier than this after it was requeued; 120 if nothing is set."""
CALL_SECONDS = 120.0


def no_slurm() -> str | None:
    """Why there can be no Slurm here; None where it can."""
    if (why := unsupported()) is not None:
        return why
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"apt-get install slurm-wlm munge: {', '.join(missing)} is not installed"
    if not os.access(FREEZER / "cgroup.procs", os.W_OK):
        return f"Slurm's cgroups need {FREEZER}, into which root can write"
    return None


class Slurm:
    """A Slurm whose nodes are up."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed = bed
        self.controller, *self.nodes = bed.hosts
        self._folder = folder
        self._daemons: list[Process] = []
        self._environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir(parents=True)
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o400)
        settings = {"controller": self.controller, "folder": folder, "credentials": CREDENTIAL_SECONDS}
        text = CONF.format(**settings, silent=SILENT_SECONDS)
        for name in self.nodes:
            text += NODE.format(name=name, address=bed.addresses[name], cpus=bed.hosts[name].cpus)
        (folder / "slurm.conf").write_text(text + PARTITION.format(names=",".join(self.nodes)))
        (folder / "cgroup.conf").write_text(CGROUPS)

    def __enter__(self) -> Slurm:
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _begin(self) -> None:
        folder = self._folder
        own = [f"--{what}={folder}/munge.{what.partition('-')[0]}" for what in ("socket", "pid-file", "log-file")]
        own += [f"--key-file={folder}/munge.key", f"--seed-file={folder}/munge.seed"]
        self._start(self.controller, ["munged", "--foreground", "--force", *own])
        until((folder / "munge.socket").exists)
        self._start(self.controller, ["slurmctld", "-D"])
        for name in self.nodes:
            self.start(name)
        until(lambda: self.idle() == len(self.nodes), said=lambda: self.call("sinfo"))

    def start(self, node: str) -> None:
        """Start Slurm's daemon on a node."""
        self._start(node, ["slurmd", "-D", "-N", node])

    def idle(self) -> int:
        """How many nodes are up and without a job."""
        try:
            return self.call("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
        except OSError:  # the controller is starting
            return 0

    def call(self, *command: str) -> str:
        """What a command prints in somebody's terminal on the controller's host.

        Raises:
            OSError: it failed.
        """
        ours = {*RAY_ENV, *os.environ, "RAY_AUTH_TOKEN"}
        plain = [f"--unset={name}" for name in sorted(ours) if name.startswith("RAY_") or name in RAY_ENV]
        # Workers at Ray's low priority take minutes to start on a machine with other work.
        process = self.bed.popen(
            self.controller,
            ["env", *plain, "RAY_worker_niceness=0", "RAY_raylet_start_wait_time_s=240", *command],
            {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
            **self._environment,
        )
        said = process.communicate(timeout=CALL_SECONDS)[0].decode()
        if process.returncode:
            raise OSError(f"{' '.join(command)} ended with {process.returncode}: {said}")
        return str(said)

    def shown(self, job: str, field: str) -> str:
        """What Slurm shows of a job, such as its `JobState`."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{field}="))

    def close(self) -> None:
        """Close the bed, with which the daemons end, and remove the cgroups that Slurm leaves."""
        self.bed.close()
        for daemon in self._daemons:
            daemon.wait(CALL_SECONDS)
        for name in self.nodes:
            for folder in sorted(FREEZER.glob(f"slurm_{name}/**/"), key=lambda path: len(path.parts), reverse=True):
                with suppress(OSError):
                    folder.rmdir()

    def _start(self, host: str, command: list[str]) -> None:
        with (self._folder / f"{command[0]}-{host}.txt").open("a") as said:
            streams = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            self._daemons.append(self.bed.popen(host, command, streams, **self._environment))
