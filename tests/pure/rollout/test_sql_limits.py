"""Statements that take much time or memory: each stays within its limits and affects no other."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import psutil
import pytest

from baton.examples.sqlite_query import MEMORY, PROCESSES, QueryFailed, QueryProcesses
from tests.waiting import until

SLACK = 20.0
"""Seconds on top of a limit that a busy machine needs to start a process; without a limit the statements take more."""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE items (name TEXT, price REAL, stock INTEGER)")
        rows = [(f"item {i}", i / 7, i) for i in range(300)]
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
    return path


@asynccontextmanager
async def joined() -> AsyncIterator[QueryProcesses]:
    queries = QueryProcesses.join()
    try:
        yield queries
    finally:
        await queries.leave()


def query_processes(recursive: bool = True) -> list[psutil.Process]:
    """The children of this process that run queries; other tests may have left children of theirs."""
    found = []
    for child in psutil.Process().children(recursive):
        with suppress(psutil.Error):  # it has just ended
            if "baton.examples.sqlite_query" in child.cmdline():
                found.append(child)
    return found


HEAVY = [
    "SELECT json_patch(j, j) FROM (SELECT json_group_object(a.stock || '-' || b.stock, 1) AS j FROM items a, items b)",
    "SELECT count(*) FROM items a, items b, items c, items d, items e",
]


async def test_an_innocent_query_amid_heavy_ones_is_answered_when_its_turn_comes(database: Path) -> None:
    before, after, seconds = 2 * PROCESSES, 4 * PROCESSES, 0.3
    async with joined() as queries:

        def asked(n: int) -> list[asyncio.Task[str]]:
            return [asyncio.create_task(queries.shown(database, HEAVY[i % 2], 1, seconds)) for i in range(n)]

        heavy = asked(before)
        innocent = asyncio.create_task(queries.shown(database, "SELECT 1", 1, SLACK))
        heavy += asked(after)
        assert await innocent == "1\n1"
        # Those before it, and what the other processes end while its own one starts: by turns, not by a clock.
        assert sum(task.done() for task in heavy) <= before + 2 * PROCESSES
        for failed in await asyncio.gather(*heavy, return_exceptions=True):
            assert isinstance(failed, QueryFailed) and str(failed) == "the query took longer than 0.3 s"


async def test_an_error_leaves_the_process_for_the_next_query_and_a_lack_of_memory_does_not(database: Path) -> None:
    async with joined() as queries:

        async def pids(sql: str, reason: str) -> set[int]:
            with pytest.raises(QueryFailed, match=reason):
                await queries.shown(database, sql, 1, SLACK)
            await queries.shown(database, "SELECT 1", 1, SLACK)
            return {child.pid for child in query_processes(recursive=False)}

        first = await pids("SELECT colour FROM items", "no such column: colour")
        assert len(first) == 1 and await pids("DROP TABLE items", "not authorized") == first
        assert not first & await pids("SELECT zeroblob(900000000)", f"more than {MEMORY >> 20} MiB of memory")


async def test_the_processes_end_with_the_last_open_episode(database: Path) -> None:
    async with joined():
        async with joined() as second:
            await second.shown(database, "SELECT 1", 1, SLACK)
        assert query_processes()
    assert query_processes() == []


ASKER = """
import asyncio, sys
from pathlib import Path
from baton.examples.sqlite_query import QueryProcesses

async def ask():
    queries = QueryProcesses.join()
    await queries.shown(Path(sys.argv[1]), "SELECT 1", 1, 60)
    print("asked", flush=True)
    await queries.shown(Path(sys.argv[1]), sys.argv[2], 1, 600)

asyncio.run(ask())
"""


def test_a_running_query_ends_when_its_asker_is_killed(database: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASKER, database, HEAVY[1]], stdout=subprocess.PIPE, text=True
    ) as asker:
        try:
            assert asker.stdout is not None and asker.stdout.readline() == "asked\n"
            children = psutil.Process(asker.pid).children(recursive=True)
            assert len(children) == 2  # the process and its keeper
        finally:
            asker.kill()
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    assert os.path.exists(database)
