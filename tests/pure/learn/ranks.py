"""Runs a function on every rank of a process group, each rank in a process of its own."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """Processes that become the ranks of one process group after another; importing torch takes them seconds, once."""

    def __init__(self, most: int, backend: str = "gloo") -> None:
        self._backend, self._most = backend, most
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self._most, mp_context=multiprocessing.get_context("spawn"))

    def __call__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, world_size, *arguments)` returns on each rank; results are pickled, so no tensors."""
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            # each call waits for the others to join the group, so each has a process of its own
            calls = [
                self._pool.submit(_rank, self._backend, store, rank, world_size, function, arguments)
                for rank in range(world_size)
            ]
            try:
                return [call.result(timeout=500) for call in calls]
            except BaseException:  # the other ranks may wait for the one that failed, and the next call for them
                for process in self._pool._processes.values():
                    process.kill()
                self.close()
                self._pool = self._new_pool()
                raise

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)
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
