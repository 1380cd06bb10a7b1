"""Runs a function on every rank of a process group, each rank in a process of its own."""

import gc
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

IMPORTED = ["pytest", "hypothesis", "torch", "service.learn.learner", "tests.pure.learn.families"]
"""Modules that the ranks share, because importing them takes seconds."""


class Ranks:
    """Worlds of ranks. The world of two goes on from call to call, because making processes takes seconds; any other
    one is for one call: torch keeps what it knows of a group's meshes as long as a process lives, so no process may
    have another rank later. The processes are forked from one that has imported torch."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self._two: World | None = None

    def __call__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(rank, world_size, *arguments)` returns on each rank; results are pickled, so no tensors."""
        if world_size != 2:
            return self.once(world_size, function, *arguments)
        world, self._two = self._two or World(2, self._backend, self._context), None
        found = world.run(function, arguments)
        self._two = world
        return found

    def once(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same by ranks that do nothing else, because the function may leave their group unusable."""
        world = World(world_size, self._backend, self._context)
        found = world.run(function, arguments)
        world.close()
        return found

    def close(self) -> None:
        """End all processes."""
        if self._two is not None:
            self._two.close()
        forkserver._forkserver._stop()
        # multiprocessing's own helper would otherwise outlive the tests until this process ends
        resource_tracker._resource_tracker._stop()


class World:
    """The processes of one group, each of which keeps its rank."""

    def __init__(self, world_size: int, backend: str, context: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ranks = [
            ProcessPoolExecutor(1, context, initializer=_join, initargs=(backend, store, rank, world_size))
            for rank in range(world_size)
        ]

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """The function's results; if a rank fails, all of them are killed, because others may wait for it."""
        calls = [one.submit(_call, function, rank, len(self._ranks), arguments) for rank, one in enumerate(self._ranks)]
        try:
            return [call.result(timeout=500) for call in calls]
        except BaseException:
            for one in self._ranks:
                for process in list((one._processes or {}).values()):
                    process.kill()
            self._end()
            raise

    def close(self) -> None:
        """Leave the group, and end the processes."""
        for call in [one.submit(_leave) for one in self._ranks]:
            call.result(timeout=60)
        self._end()

    def _end(self) -> None:
        for one in self._ranks:
            one.shutdown()
        self._folder.cleanup()


def _join(backend: str, store: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=240)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    if backend == "gloo":  # who leaves the group closes its connections, which others may still be making
        dist.barrier()


def _call(function: Callable[..., Any], rank: int, world_size: int, arguments: tuple[Any, ...]) -> Any:
    gc.collect()  # learners of earlier calls
    return function(rank, world_size, *arguments)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
