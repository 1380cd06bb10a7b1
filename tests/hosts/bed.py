"""Several Ray hosts on this machine, each with an address, a name, processes, clocks and folders of its own.

A host is a process in Linux namespaces; whatever runs in the host ends with that process. Namespaces and devices have
no name outside of the bed, and each host ends when the process that made the bed is gone, however that ended: the
kernel then removes all of it.

    with Bed(shared, [Host("a", cpus=0), Host("b"), Host("c", labels={"pool": "spot"})]) as bed:
        bed.start_ray()
        run = bed.popen("a", ["baton", "run", ...], RAY_ADDRESS=bed.address)
        bed.cut("b"); bed.join("b"); bed.kill("c")

The hosts share this checkout, Python and the folder `shared`; they reach nobody but each other.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from actors import RAY_ENV

ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
RAY_PORT = 6379
FOLDER = "baton-bed-"
"""How the folders of beds begin, before the id of the process; all that may be left of a process that was killed."""
START_SECONDS = 240.0
"""For all Ray nodes, on a loaded machine."""
END_SECONDS = 30.0
OBJECT_STORE_BYTES = 200 << 20
DAYS_APART = 3
"""By how much the monotonic clocks of two hosts differ. The wall clock is the machine's: Linux has no other."""

TOOLS = ("hostname", "ip", "mount", "nsenter", "tc", "unshare")
NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--time")
CLONE_NEWNET = 0x40000000

HOLD = """
set -e
name=$1 own=$2 hosts=$3 shared=$4 writes=$5; shift 5
hostname "$name"
for kept; do case $kept in /tmp/*) mkdir -p "$own${kept#/tmp}"; mount --bind "$kept" "$own${kept#/tmp}";; esac; done
mount --bind "$hosts" /etc/hosts
mkdir "$own/sys"
mount -t sysfs sysfs "$own/sys"
mount --rbind /sys/fs/cgroup "$own/sys/fs/cgroup"
mount --rbind "$own/sys" /sys
mount --rbind "$own" /tmp
mount -t tmpfs tmpfs /dev/shm
mount --bind "$shared" "$shared"
mount -o "remount,bind,$writes" "$shared"
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""
"""What the first process of a host does: it makes the host's folders, and then waits for the end of its input. With
SIGCHLD ignored, the kernel removes the ended processes that it inherits; a shell would not ignore it, but end."""


@dataclass(frozen=True)
class Host:
    """A host to be."""

    name: str
    cpus: int = 1
    labels: dict[str, str] = field(default_factory=dict)
    writes: bool = True
    """Whether it may write into the shared folder."""


def unsupported() -> str | None:
    """Why no bed can be made here; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "several hosts on one machine need Linux and root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"several hosts on one machine need {', '.join(missing)}"
    tried = "ip link add switch type bridge && ip link add to-a type veth peer name e0 && mount -t tmpfs tmpfs /dev/shm"
    made = subprocess.run(["unshare", *NAMESPACES, "--fork", "sh", "-ec", tried], capture_output=True, text=True)
    return f"namespaces are not permitted here: {made.stderr.strip()}" if made.returncode else None


class Bed:
    """Hosts that are up, the network between them, and Ray on all of them; the first one has Ray's head."""

    def __init__(self, shared: Path, hosts: Sequence[Host]) -> None:
        self._shared = shared
        self.hosts = {host.name: host for host in hosts}
        self.head = hosts[0].name
        self.addresses = {host.name: f"{NETWORK}.{number}" for number, host in enumerate(hosts, start=1)}
        self.address = f"{self.addresses[self.head]}:{RAY_PORT}"
        """RAY_ADDRESS of what runs in a host."""
        self._token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)

    def __enter__(self) -> Bed:
        for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
            if not psutil.pid_exists(int(left.name.removeprefix(FOLDER).partition("-")[0])):
                shutil.rmtree(left, ignore_errors=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        """Of each host, its own /tmp."""
        self._holders: dict[str, subprocess.Popen[str]] = {}
        names = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        try:
            self._switch = self._hold("", ["unshare", "--net", "sh", "-c", "echo ready; read -r _"])
            self._on_switch("ip link add switch type bridge && ip link set switch up")
            for name in self.hosts:
                self.boot(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host, and remove the hosts."""
        for name in [*self._holders]:
            self._end(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- hosts --------------------------------------------------------------------------------------------------------

    def boot(self, name: str) -> None:
        """Make a host, also one that was killed; its own folders are empty then, and no Ray runs in it."""
        host, own = self.hosts[name], self.folder / name
        shutil.rmtree(own, ignore_errors=True)
        (own / "home").mkdir(parents=True)
        apart = str(DAYS_APART * 86400 * list(self.hosts).index(name))
        alone = ["--fork", "--kill-child", "--mount-proc", "--propagation=private"]
        alone += ["--monotonic", apart, "--boottime", apart]
        command = ["unshare", *NAMESPACES, *alone, "sh", "-c", HOLD, "sh"]
        names, writes = self.folder / "hosts", "rw" if host.writes else "ro"
        kept = [path for path in (ROOT, Path(sys.prefix).resolve(), self._shared) if path.is_relative_to("/tmp")]
        command += [str(word) for word in (name, own, names, self._shared, writes, *kept)]
        first = psutil.Process(self._hold(name, command)).children()[0].pid
        port, card = f"to-{name}", f"02:00:00:00:00:{1 + list(self.hosts).index(name):02x}"
        self._on_switch(f"ip link add {port} type veth peer name e0 address {card} netns {first}")
        self._on_switch(f"ip link set {port} master switch up")
        self.call(name, f"ip addr add {self.addresses[name]}/24 dev e0 && ip link set e0 up")

    def _hold(self, name: str, command: Sequence[str]) -> int:
        """Start the process that holds namespaces until this process ends; returns its id."""
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._holders[name] = holder
        if holder.stdout is None or holder.stdout.readline() != "ready\n":
            raise OSError(f"no host can be made here: {' '.join(command[:2])} ended")
        return holder.pid

    def first(self, name: str) -> int:
        """The id of the first process of a host."""
        return psutil.Process(self._holders[name].pid).children()[0].pid

    def kill(self, name: str) -> None:
        """End a host as a power cut does: its link is gone before its processes can close a connection."""
        self._on_switch(f"ip link delete to-{name}")
        self._end(name)

    def _end(self, name: str) -> None:
        holder = self._holders.pop(name)
        for process in (*psutil.Process(holder.pid).children(), psutil.Process(holder.pid)):
            process.send_signal(signal.SIGKILL)
        holder.wait(END_SECONDS)
        for pipe in (holder.stdin, holder.stdout):
            if pipe is not None:
                pipe.close()

    # -- the network --------------------------------------------------------------------------------------------------

    def _on_switch(self, command: str) -> None:
        subprocess.run(["nsenter", "--target", str(self._switch), "--net", "sh", "-ec", command], check=True)

    def cut(self, name: str) -> None:
        """Pull a host's cable."""
        self._on_switch(f"ip link set to-{name} down")

    def join(self, name: str) -> None:
        """Plug the cable in again."""
        self._on_switch(f"ip link set to-{name} up")

    def limit(self, name: str, mbit: int) -> None:
        """Bound what a host sends and what it gets."""
        bound = f"root tbf rate {mbit}mbit burst 32kbit latency 400ms"
        self._on_switch(f"tc qdisc replace dev to-{name} {bound}")
        self.call(name, f"tc qdisc replace dev e0 {bound}")

    def read_only(self, name: str) -> None:
        """Let a host write no file of the shared folder, as on a mount that failed; files that are open stay so."""
        self.call(name, f"mount --bind {self._shared} {self._shared} && mount -o remount,bind,ro {self._shared}")

    def enter_network(self, name: str) -> None:
        """Let the current thread open its connections in a host, such as one to the run's metrics."""
        with open(f"/proc/{self.first(name)}/ns/net") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"the network of host {name} cannot be entered")

    # -- what runs in a host ------------------------------------------------------------------------------------------

    def popen(self, name: str, command: Sequence[str], /, popen: dict[str, Any] | None = None, **more: str) -> Process:
        """Start a process in a host, in this checkout; `more` is added to its environment.

        The process has a session of its own, so that Ctrl-C reaches only the process that made the bed.
        """
        inside = ["nsenter", "--target", str(self.first(name)), *NAMESPACES, "sh", "-c", 'cd "$0" && exec "$@"']
        return Process(
            [*inside, str(ROOT), *command],
            env=self._environment(**more),
            start_new_session=True,
            **(popen or {}),
        )

    def _environment(self, **more: str) -> dict[str, str]:
        own = {
            **RAY_ENV,
            "RAY_AUTH_TOKEN": self._token,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": "/tmp/home",
            "RAY_raylet_start_wait_time_s": f"{START_SECONDS:.0f}",
            "RAY_worker_niceness": "0",  # else other work of this machine takes minutes from each start of an engine
        }
        return {**os.environ, **own, **more}

    def call(self, name: str, command: str) -> None:
        """Run a shell command in a host, and wait for its success."""
        process = self.popen(name, ["sh", "-ec", command])
        if code := process.wait(END_SECONDS):
            raise OSError(f"host {name}: {command} ended with {code}")

    def start_ray(self, *names: str) -> None:
        """Start Ray on these hosts, or on all."""
        names = names or tuple(self.hosts)
        if self.head in names:
            self._ray_is_up(self.head, self._ray(self.head))
        workers = {name: self._ray(name) for name in names if name != self.head}
        for name, process in workers.items():
            self._ray_is_up(name, process)

    def _ray(self, name: str) -> Process:
        host, address = self.hosts[name], self.addresses[name]
        first = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        role = first if name == self.head else [f"--address={self.address}"]
        command = ["ray", "start", *role, f"--node-ip-address={address}", f"--num-cpus={host.cpus}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
        labels = {"host": name, **host.labels}
        command.append("--labels=" + ",".join(f"{key}={value}" for key, value in labels.items()))
        with (self.folder / f"ray-{name}.txt").open("w") as said:
            return self.popen(name, command, {"stdout": said, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL})

    def _ray_is_up(self, name: str, process: Process) -> None:
        if process.wait(START_SECONDS):
            raise OSError(f"Ray did not start on host {name}:\n{(self.folder / f'ray-{name}.txt').read_text()}")


class Process(subprocess.Popen[bytes]):
    """A process in a host: signals reach the process itself, not the one that entered the host for it."""

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            for process in psutil.Process(self.pid).children():
                process.send_signal(sig)
