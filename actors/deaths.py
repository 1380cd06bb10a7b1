"""Which process an actor has, and why one has ended, as Ray knows it; for `service.run.supervisor`."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any
from uuid import uuid4

import ray
import ray.exceptions
from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import WorkerTableData

from service.run.supervisor import Life


class Supervised:
    """An actor that answers which process it is."""

    @cached_property
    def _process(self) -> str:
        """An id of this process that no other one has; the system's ids repeat, especially in pods."""
        return str(ray.get_runtime_context().get_worker_id()) if ray.is_initialized() else uuid4().hex

    @property
    def _is_set_up(self) -> bool:
        """Whether this process has been given all that its work needs."""
        return True

    @ray.method(max_task_retries=0)  # type: ignore[untyped-decorator]
    async def life(self) -> Life:
        """Return which process this is."""
        return Life(self._process, self._is_set_up)


async def life_of(actor: Any) -> Life | None:
    """Ask an actor which process it is; None: it has none."""
    try:
        life: Life = await actor.life.remote()
    except ray.exceptions.RayError:
        return None
    return life


def is_death(error: BaseException) -> bool:
    """Return whether a call may have failed because the process that it called has died."""
    return isinstance(error.__cause__ or error, ray.exceptions.RayActorError)


async def cause_of_death(process: str) -> str | None:
    """Return how the process with this id ended; None: the run has ended it."""
    return await asyncio.to_thread(_why_died, process)


def _why_died(process: str) -> str | None:
    worker = _worker(process)
    if worker is None or worker.is_alive:
        return "died; Ray does not know why"
    if "ray.kill" in worker.exit_detail:
        return None
    first, _, _ = worker.exit_detail.partition(". Some common causes")
    return f"(pid {worker.pid}) died: {first}"


def _worker(process: str) -> Any:
    """Return Ray's record of a process, if there is one."""
    if not ray.is_initialized():
        return None
    found = cluster_state._connect_and_get_accessor().get_worker_info(ray.WorkerID.from_hex(process))
    return None if found is None else WorkerTableData.FromString(found)
