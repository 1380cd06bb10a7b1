"""Asks Ray for the process of an actor, and for the reason why a process has ended."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import ray
import ray.exceptions
from ray._common.utils import get_system_memory
from ray._private.state import state as cluster_state
from ray.core.generated.common_pb2 import WorkerExitType
from ray.core.generated.gcs_pb2 import WorkerTableData

from service.run.liveness.host_memory import Memory, in_gb, remedy
from service.run.liveness.supervisor import CAUSE_SECONDS, Life

WATCHING = "watching"
"""Ray's concurrency group for health checks; a health check does not wait for other calls of the actor."""
LOOK_SECONDS = 1.0
"""Seconds without an answer after which Ray is asked whether it restarts the actor."""
FAMILY_SECONDS = 10.0
"""Seconds between two searches for the children of a process, whose memory counts as the process's own."""
REPORT_TRIES, REPORT_SECONDS = 5, 0.2
"""Maximum number of requests for Ray's record of a death, and seconds between two requests. Ray writes the record only
after the connection to the process has ended."""

KERNEL_SECONDS = 15.0
"""An actor that dies within these seconds after the kernel killed a process is taken for the killed process."""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_HOST_MEMORY = re.compile(r"was (\S+) used / (\S+) limit")


class Supervised:
    """Base class of actors that answer health checks."""

    _family: Sequence[psutil.Process] = ()
    _found_at = -math.inf

    @cached_property
    def _process(self) -> str:
        """A unique id of this process; process ids of the system repeat, especially in pods."""
        return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else uuid4().hex

    @property
    def _is_set_up(self) -> bool:
        """Whether this process has received everything that its work needs."""
        return True

    @ray.method(max_task_retries=0)  # type: ignore[untyped-decorator]
    async def life(self) -> Life:
        """Return the identity and state of this process."""
        return self._life()

    def _life(self) -> Life:
        now = time.monotonic()
        if ray.is_initialized() and now - self._found_at > FAMILY_SECONDS:
            process = psutil.Process()
            self._found_at, self._family = now, (process, *process.children(recursive=True))
        return Life(self._process, self._is_set_up, _memory(self._family) if self._family else None)


async def life_of(actor: Any) -> Life | None:
    """Ask an actor for the identity and state of its process; None: the actor has no process.

    Raises:
        RayTaskError: the actor could not answer, which is a bug.
    """
    kernel_kills.look()
    asking = asyncio.ensure_future(actor.life.remote())
    try:
        while not (await asyncio.wait([asking], timeout=LOOK_SECONDS))[0]:
            looking = asyncio.ensure_future(asyncio.to_thread(_restarts, actor))
            # Ray's control store may be away for longer than the actor is silent.
            await asyncio.wait([asking, looking], return_when=asyncio.FIRST_COMPLETED)
            if looking.done() and looking.result():
                return None
        life: Life = asking.result()
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError:
        return None
    finally:
        asking.cancel()
    return life


def _restarts(actor: Any) -> bool:
    """Return whether Ray is restarting this actor; if Ray repeats failed calls, a call waits until the restart."""
    return bool(ray.is_initialized() and cluster_state.actor_table(actor._actor_id.hex()).get("State") == "RESTARTING")


def is_death(error: BaseException) -> bool:
    """Return True if an error of a call may mean that the called process has died."""
    return isinstance(error.__cause__ or error, ray.exceptions.RayActorError)


async def cause_of_death(name: str, last: Life) -> str | None:
    """Return a text that says how an actor's process ended; None: the run has ended the process. `last`: the process's
    last answer to a health check."""
    for _ in range(REPORT_TRIES):
        try:
            worker = await asyncio.wait_for(asyncio.to_thread(_worker, last.process), CAUSE_SECONDS)
        except TimeoutError:
            return "died; Ray's control store does not answer"
        if worker is None:
            return "died; Ray does not know why"
        if not worker.is_alive:
            return why_died(name, last, worker)
        await asyncio.sleep(REPORT_SECONDS)
    return "cannot be reached"


def why_died(name: str, last: Life, worker: WorkerTableData) -> str | None:
    """Return a text that says how a process ended, from Ray's record of it; None: the run has ended the process."""
    if "ray.kill" in worker.exit_detail:
        return None
    size = "" if last.memory is None else f", at {in_gb(last.memory.n_bytes)}"
    if worker.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY:
        full = _HOST_MEMORY.search(worker.exit_detail)
        host = f" (its host had {full[1]} of {full[2]} in use)" if full else ""
        return f"(pid {worker.pid}) was out of memory{size}: Ray ended it{host}; {remedy(name)}"
    here = last.memory is not None and last.memory.host == ray.util.get_node_ip_address()
    if here and (killed := kernel_kills.clause(name)):
        return f"(pid {worker.pid}) died{size}{killed}"
    first, _, _ = worker.exit_detail.partition(". Some common causes")
    return f"(pid {worker.pid}) died: {first}"


class KernelKills:
    """Detects when this host's kernel has killed a process for lack of memory. The kernel's counter does not say which
    process."""

    def __init__(self, counters: Path = Path("/proc/vmstat")) -> None:
        self._counters, self._seen, self._at = counters, "", -math.inf

    def look(self) -> None:
        """Note the time if the kernel's counter of such kills has grown since the last call."""
        with suppress(OSError):  # some sandboxes have no such file
            found = _OOM_KILLS.search(self._counters.read_text())
            count = "" if found is None else found[1]
            if self._seen not in ("", count):
                self._at = time.monotonic()
            self._seen = count

    def clause(self, name: str) -> str:
        """Return the end of a sentence about the death of the actor `name`: most likely it was out of memory. Empty if
        the kernel has not recently killed a process."""
        self.look()
        if time.monotonic() - self._at > KERNEL_SECONDS:
            return ""
        return f", most likely out of memory: the kernel has just killed a process of this host; {remedy(name)}"


kernel_kills = KernelKills()
"""The kills for lack of memory by the kernel of the driver's host."""


def _memory(family: Sequence[psutil.Process]) -> Memory:
    """Measure processes, without the memory that they share with others."""
    n_bytes = 0
    for each in family:
        with suppress(psutil.NoSuchProcess):
            used = each.memory_info()
            n_bytes += used.rss - used.shared
    return Memory(ray.util.get_node_ip_address(), n_bytes, get_system_memory())


def _worker(process: str) -> Any:
    """Return Ray's record of a process, if there is one."""
    if not ray.is_initialized():
        return None
    found = cluster_state._connect_and_get_accessor().get_worker_info(ray.WorkerID.from_hex(process))
    return None if found is None else WorkerTableData.FromString(found)
