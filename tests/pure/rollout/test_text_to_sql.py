"""Reading a database for a policy, judging its queries, and the limits of each statement."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from baton.examples import data, text_to_sql
from baton.examples.sqlite_query import MEMORY, QueryFailed, QueryProcesses, read
from baton.examples.text_to_sql import TextToSql, database_file
from service.rollout.environment import StepResult, Task

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
NAMES = "SELECT name FROM items"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop" / "shop.sqlite"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE items (name TEXT, price REAL, stock INTEGER)")
        connection.executemany(
            "INSERT INTO items VALUES (?, ?, ?)", [("pen", 1.5, 10), ("ink", 4.0, 0), ("nib", None, 3)]
        )
    return path


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM items",
        "UPDATE items SET stock = 1",
        "INSERT INTO items VALUES ('x', 1, 1)",
        "DROP TABLE items",
        "CREATE TABLE other (a)",
        "CREATE TEMP TABLE other (a)",
        "ATTACH DATABASE 'other.sqlite' AS other",
        "PRAGMA query_only = 0",
        "PRAGMA table_info(items)",
        "VACUUM INTO 'other.sqlite'",
        "BEGIN EXCLUSIVE",
        "SELECT load_extension('x')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT FTS3_Tokenizer('simple', x'00')",
        "SELECT 1; DELETE FROM items",
        "SELECT writefile('x', 'y')",
        "not sql at all",
        "SELECT '\ud800'",
        "SELECT '\x00'",
    ],
)
def test_whatever_does_not_only_read_is_refused_and_changes_nothing(database: Path, sql: str) -> None:
    before = database.read_bytes()
    with pytest.raises(QueryFailed):
        read(database, sql, 10)
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == ["shop.sqlite"]


def test_more_rows_than_asked_for_are_cut_off_and_said_to_be(database: Path) -> None:
    result = read(database, ENDLESS, 5)
    assert (result.rows, result.truncated) == ([(1,), (2,), (3,), (4,), (5,)], True)
    assert not read(database, "SELECT * FROM items", 3).truncated


# -- the environment ---------------------------------------------------------------------------------------------------


async def said(folder: Path, truth: str, *texts: str, db_id: str = "shop") -> list[StepResult]:
    environment = TextToSql(str(folder))
    await environment.reset(Task("p", (), "text_to_sql", {"ground_truth": truth}, {"db_id": db_id}), 0)
    try:
        return [await environment.step(text) for text in texts]
    finally:
        await environment.close()


async def test_each_text_is_answered_with_rows_or_the_reason_and_a_solution_is_judged_by_its_rows(
    database: Path,
) -> None:
    told = {
        "let me see <sql>SELECT name, price FROM items</sql>": "name | price\npen | 1.5\nink | 4.0\nnib | NULL",
        "<sql>SELECT colour FROM items</sql>": "error : no such column: colour",
        "<sql>DROP TABLE items</sql>": "error : not authorized",
        "I think so": "give <sql> or <solution>",
    }
    for text, result in zip(told, await said(database.parents[1], "SELECT 1", *told), strict=True):
        assert result.messages[0]["content"] == f"<observation> {told[text]} </observation>"
        assert (result.reward, result.done) == (0.0, False) and result.info == {"queries": float("<sql>" in text)}
    judged = [
        (NAMES, f"{NAMES} ORDER BY name DESC", 1.0),
        (f"{NAMES} ORDER BY name", f"{NAMES} ORDER BY name DESC", 0.0),
        (f"{NAMES} ORDER BY name", "SELECT name AS other FROM items ORDER BY 1", 1.0),
        (NAMES, "SELECT DISTINCT name FROM items UNION ALL SELECT 'pen'", 0.0),
        ("SELECT count(*) FROM items", "SELECT 3.0", 1.0),
        ("SELECT avg(price) FROM items", "SELECT 2.75000001", 1.0),
        ("SELECT avg(price) FROM items", "SELECT 2.76", 0.0),
        (NAMES, "SELECT nothing", 0.0),
        (NAMES, "", 0.0),
        (NAMES, ENDLESS, 0.0),
    ]
    shared = QueryProcesses.join()  # else every episode starts a process
    for truth, solution, wanted in judged:
        [result] = await said(database.parents[1], truth, f"<solution>{solution}</solution>")
        assert (result.reward, result.done) == (wanted, True), solution
    await shared.leave()


@pytest.mark.parametrize("db_id", ["../shop/shop", "", "missing", "/etc/passwd", ".."])
async def test_a_database_is_named_and_not_reached_by_a_path(database: Path, db_id: str) -> None:
    with pytest.raises(ValueError, match="database"):
        await said(database.parents[1], "SELECT 1", db_id=db_id)


async def test_made_questions_are_solved_by_their_own_queries_and_not_by_the_wrong_ones(tmp_path: Path) -> None:
    data.write_database(tmp_path / "towns.sqlite")
    assert database_file(data.DATABASE.parent, "towns") == data.DATABASE
    for made, shipped in zip(dump(tmp_path / "towns.sqlite"), dump(data.DATABASE), strict=True):
        assert made == shipped
    rng, rewards, shared = (
        np.random.default_rng(0),
        {"sql": list[float](), "wrong": list[float]()},
        QueryProcesses.join(),
    )
    for _ in range(30):
        asked = text_to_sql.question(rng)
        for kind, given in (("sql", asked.sql), ("wrong", asked.wrong)):
            [result] = await said(tmp_path, asked.sql, f"<solution> {given} </solution>", db_id="towns")
            rewards[kind].append(result.reward)
    await shared.leave()
    assert np.mean(rewards["sql"]) == 1.0
    assert np.mean(rewards["wrong"]) < 0.3  # a few coincide, where only one town lies on the river


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


# -- limits ------------------------------------------------------------------------------------------------------------

SLACK = 20.0
"""Seconds on top of a limit that a busy machine needs to start a process; without a limit the statements take more."""


@asynccontextmanager
async def joined() -> AsyncIterator[QueryProcesses]:
    queries = QueryProcesses.join()
    try:
        yield queries
    finally:
        await queries.leave()


def query_processes() -> set[int]:
    """The children of this process that run queries; other tests may have left children of theirs."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "baton.examples.sqlite_query" in child.cmdline():
                found.add(child.pid)
    return found


async def test_an_error_leaves_the_process_for_the_next_query_and_a_lack_of_memory_does_not(
    database: Path,
) -> None:
    async with joined() as queries:

        async def pids(sql: str, reason: str) -> set[int]:
            with pytest.raises(QueryFailed, match=reason):
                await queries.shown(database, sql, 1, SLACK)
            await queries.shown(database, "SELECT 1", 1, SLACK)
            return query_processes()

        first = await pids("SELECT colour FROM items", "no such column: colour")
        assert len(first) == 1 and await pids("DROP TABLE items", "not authorized") == first
        assert not first & await pids("SELECT zeroblob(900000000)", f"more than {MEMORY >> 20} MiB of memory")
        with pytest.raises(QueryFailed, match="longer than 0"):
            await queries.shown(database, f"SELECT count(*) FROM ({ENDLESS})", 1, 0.3)
        async with joined() as second:
            await second.shown(database, "SELECT 1", 1, SLACK)
        assert query_processes(), "they end with the last open episode"
    assert query_processes() == set()
