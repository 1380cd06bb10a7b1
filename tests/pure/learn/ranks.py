"""Runs a function on every rank of a process group, each rank in a process of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

IMPORTED = ["pytest", "hypothesis", "torch", "service.learn.learner", "tests.pure.learn.test_families"]
"""Modules that the ranks share, because importing them takes seconds."""


class Ranks:
    """Makes new processes for every process group: torch keeps what it knows of a group's meshes as long as a process
    lives, also where that process has another rank in the next group. The processes are forked from one that has
    imported torch."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)

    def __call__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, world_size, *arguments)` returns on each rank; results are pickled, so no tensors."""
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(world_size, mp_context=self._context) as pool,
        ):
            store = str(Path(folder) / "store")
            # each call waits for the others to join the group, so each has a process of its own
            calls = [
                pool.submit(_rank, self._backend, store, rank, world_size, function, arguments)
                for rank in range(world_size)
            ]
            try:
                return [call.result(timeout=500) for call in calls]
            except BaseException:  # the other ranks may wait for the one that failed
                for process in pool._processes.values():
                    process.kill()
                raise

    def close(self) -> None:
        """End the process from which the ranks were forked."""
        forkserver._forkserver._stop()
        # multiprocessing's own helper would otherwise outlive the tests until this process ends
        resource_tracker._resource_tracker._stop()


def _rank(
    backend: str, store: str, rank: int, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=240)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    try:
        if backend == "gloo":  # who leaves the group closes its connections, which others may still be making
            dist.barrier()
        return function(rank, world_size, *arguments)
    finally:
        dist.destroy_process_group()
