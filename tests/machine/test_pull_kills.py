"""Ranks and workers of engines are killed while weights are pulled: no mixture of versions passes for one version."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from actors.weights.part import Source
from actors.weights.part_buffers import PartBuffers
from actors.weights.pulled import WeightFile
from service.errors import WeightsGone
from service.learn.model.sharding import Rows, shard_bounds

pytestmark = pytest.mark.full

RANKS, WORKERS = 4, ((0, 1), (0, 1), (0, 2), (1, 2))
"""Workers of three engines, as (rank, tensor parallelism)."""
SHAPE, TENSORS, KILLS, SECONDS = (64, 4096), 24, 100, 30.0
FORKED = multiprocessing.get_context("forkserver")
"""Processes are forked from one without threads."""
FORKED.set_forkserver_preload([__name__])


@pytest.fixture(autouse=True)
def forks() -> Iterator[None]:
    """End what multiprocessing started for itself."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def value(version: int, name: int) -> float:
    return float(version * 100 + name)


def rank(connection: Connection, number: int) -> None:
    """Publishes each version that it is told."""
    torch.set_num_threads(1)
    buffers = PartBuffers(number)
    first, end = shard_bounds(SHAPE[0], number, RANKS)
    while True:
        version = connection.recv()
        rows = {str(name): torch.full((end - first, SHAPE[1]), value(version, name)) for name in range(TENSORS)}
        buffers.copy(version, {name: Rows(SHAPE, first, tensor) for name, tensor in rows.items()}, torch.float32)
        connection.send(buffers.source)


def worker(connection: Connection, number: int) -> None:
    """Pulls its rows of one half of the tensors and its columns of the others; says what it got."""
    torch.set_num_threads(1)
    place, width = WORKERS[number]
    while True:
        version, sources = connection.recv()
        try:
            with closing(WeightFile(version, sources)) as file:
                parts = {
                    int(name): tensor.chunk(width, dim=int(name) % 2)[place].clone() for name, tensor in file.tensors()
                }
                file.check()
        except WeightsGone:
            connection.send("gone")
            continue
        whole = all(bool((part == value(version, name)).all()) for name, part in parts.items())
        connection.send("whole" if whole and len(parts) == TENSORS else "torn")


class Started:
    """A process and the end of its pipe; one that was killed is started anew."""

    def __init__(self, run: Any, number: int) -> None:
        self.connection, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=run, args=(theirs, number), daemon=True)
        self.process.start()
        theirs.close()
        self.run, self.number = run, number

    def again(self) -> Started:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SECONDS)
        return Started(self.run, self.number)

    def answer(self) -> Any:
        """What it says within its deadline."""
        assert self.connection.poll(SECONDS), "nobody waits beyond the deadline"
        return self.connection.recv()


def test_a_hundred_kills_in_the_middle_of_pulls_leave_no_torn_version_and_nobody_waiting() -> None:
    chance, said = random.Random(0), list[str]()
    ranks = [Started(rank, number) for number in range(RANKS)]
    workers = [Started(worker, number) for number in range(len(WORKERS))]

    def publish(version: int) -> list[Source]:
        for each in ranks:
            each.connection.send(version)
        return [each.answer() for each in ranks]

    for round_ in range(KILLS):
        version = 3 * round_
        sources = publish(version)
        for each in workers:
            each.connection.send((version, sources))
        time.sleep(chance.uniform(0, 0.02))
        if round_ % 2:
            number = chance.randrange(RANKS)
            ranks[number] = ranks[number].again()
        else:
            number = chance.randrange(len(WORKERS))
            workers[number] = workers[number].again()
        if round_ % 3 == 0:  # engines that lapsed: both buffers are filled anew while they may still read
            publish(version + 1)
            publish(version + 2)
        killed = None if round_ % 2 else number
        said += [each.answer() for place, each in enumerate(workers) if place != killed]
    sources = publish(3 * KILLS)
    for each in workers:
        each.connection.send((3 * KILLS, sources))
    assert [each.answer() for each in workers] == ["whole"] * len(WORKERS), "all go on"
    for each in [*ranks, *workers]:
        each.process.kill()
    assert "torn" not in said, Counter(said)
    assert set(said) == {"whole", "gone"}, "some were replaced in time, others were not"
