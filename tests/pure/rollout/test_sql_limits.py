"""Statements that take much time or memory: each stays within its limits and affects no other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
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


def text(rng: random.Random, depth: int) -> str:
    """An expression that is a text or blob, often a long one."""
    size = rng.choice([10, 3_000, 200_000, 30_000_000, 900_000_000])
    plain = [
        f"hex(zeroblob({size}))",
        f"hex(randomblob({size}))",
        f"printf('%.{size}c', 'a')",
        f"printf('%0{size}d', 1)",
        f"zeroblob({size})",
        "name",
        "'[' || substr(hex(zeroblob(20000)), 1) || ']'",
    ]
    if not depth:
        return rng.choice(plain)
    one, two = text(rng, depth - 1), text(rng, depth - 1)
    pairs = f"(SELECT json_group_object(a.stock || '-' || b.stock, {one}) FROM items AS a, items AS b)"
    return rng.choice(
        [
            f"replace({one}, '0', {two})",
            f"json_patch({pairs}, {pairs})",
            f"(SELECT group_concat({one}) FROM items, items AS more)",
            f"upper({one}) || {two}",
            f"quote({one})",
            f"trim({one}, {two})",
            f"json_set('{{}}', '$.a', {one}, '$.b', {two})",
            f"(SELECT max({one}) FROM items AS a, items AS b, items AS c)",
        ]
    )


def truth(rng: random.Random, depth: int) -> str:
    """An expression that searches or compares texts."""
    one, two = text(rng, depth), text(rng, depth)
    return rng.choice(
        [
            f"instr({one}, {two})",
            f"{one} LIKE '{'%a' * rng.choice([5, 60])}b'",
            f"{one} GLOB '{'*[0-9]' * rng.choice([5, 60])}x'",
            f"{one} LIKE {two}",
            f"{one} IN (SELECT {two} FROM items)",
            f"{one} REGEXP '(0+)+$'",
            f"length({one}) + unicode({two})",
            f"json_extract({one}, '$.a[0]')",
        ]
    )


def statement(rng: random.Random) -> str:
    """A statement whose cost nobody knows beforehand."""
    what = rng.choice([text, truth])(rng, rng.randrange(3))
    endless = "WITH RECURSIVE n(i, t) AS (SELECT 1, '' UNION ALL SELECT i + 1, t || {} FROM n) SELECT {} FROM n"
    return rng.choice(
        [
            f"SELECT {what} FROM items",
            f"SELECT {what} FROM items AS a, items AS b, items AS c, items AS d ORDER BY 1",
            f"SELECT count(DISTINCT {what}) FROM items, items AS more, items AS most",
            endless.format(what.replace("name", "'a'"), rng.choice(["i", "count(*)", "max(t)", "group_concat(i)"])),
            f"SELECT {what} AS k, count(*) FROM items, items AS more GROUP BY k ORDER BY random()",
        ]
    ).replace("name", "items.name")


@pytest.mark.parametrize("n", [24, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
async def test_no_statement_of_a_grammar_of_heavy_ones_takes_more_than_its_time_and_memory(
    database: Path, n: int
) -> None:
    rng, seconds = random.Random(n), 0.1
    known: set[str] = set()
    peaks = [0]
    running = asyncio.Semaphore(PROCESSES)

    async def ask(queries: QueryProcesses, sql: str) -> None:
        async with running:
            begun = time.monotonic()
            try:
                known.add((await queries.shown(database, sql, 20, seconds))[:20])
            except QueryFailed as failed:
                known.add(str(failed))
            assert time.monotonic() - begun < seconds + SLACK, sql
        peaks.extend(peak_memory())

    before = psutil.Process().memory_info().rss
    async with joined() as queries:
        await asyncio.gather(*(ask(queries, statement(rng)) for _ in range(n)))
        assert await queries.shown(database, "SELECT 1", 1, SLACK) == "1\n1"
    assert max(peaks) <= MEMORY
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert any("took longer than" in one for one in known) and any("MiB of memory" in one for one in known), known
    assert query_processes() == []


def query_processes(recursive: bool = True) -> list[psutil.Process]:
    """The children of this process that run queries; other tests may have left children of theirs."""
    found = []
    for child in psutil.Process().children(recursive):
        with suppress(psutil.Error):  # it has just ended
            if "baton.examples.sqlite_query" in child.cmdline():
                found.append(child)
    return found


def peak_memory() -> list[int]:
    """The largest address space that each living query process has had, in bytes."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.rlimit(psutil.RLIMIT_AS)[0] == MEMORY:
                status = Path(f"/proc/{child.pid}/status").read_text().split()
                found.append(int(status[status.index("VmPeak:") + 1]) << 10)
        except (psutil.Error, OSError, ValueError):  # it has just ended
            continue
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


async def test_a_query_ends_in_time_also_where_its_parent_blocks_and_ignores_the_signal(database: Path) -> None:
    before, blocked = signal.signal(signal.SIGALRM, signal.SIG_IGN), {signal.SIGALRM}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        async with joined() as queries, asyncio.timeout(SLACK):
            with pytest.raises(QueryFailed, match="took longer than"):
                await queries.shown(database, HEAVY[1], 1, 0.1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGALRM, before)


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
