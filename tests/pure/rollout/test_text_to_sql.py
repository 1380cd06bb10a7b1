"""Reading a database for a policy, and judging its queries."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from baton.examples import data, text_to_sql
from baton.examples.sqlite_query import QueryFailed, QueryProcesses, read
from baton.examples.text_to_sql import TextToSql, database_file
from service.rollout.environment import StepResult, Task


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


def test_a_query_gives_columns_and_rows(database: Path) -> None:
    result = read(database, "SELECT name, price FROM items WHERE stock > 0 ORDER BY name", 10)
    assert (result.columns, result.rows, result.truncated) == (("name", "price"), [("nib", None), ("pen", 1.5)], False)


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


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def test_more_rows_than_asked_for_are_cut_off_and_said_to_be(database: Path) -> None:
    endless_rows = ENDLESS.replace("count(*)", "i")
    result = read(database, endless_rows, 5)
    assert (result.rows, result.truncated) == ([(1,), (2,), (3,), (4,), (5,)], True)
    assert not read(database, "SELECT * FROM items", 3).truncated


def episode(folder: Path, truth: str, db_id: str = "shop") -> tuple[TextToSql, Task]:
    prompt = ({"role": "user", "content": "?"},)
    return TextToSql(str(folder)), Task("p", prompt, "text_to_sql", {"ground_truth": truth}, {"db_id": db_id})  # type: ignore[arg-type]


async def said(folder: Path, truth: str, text: str) -> StepResult:
    environment, task = episode(folder, truth)
    await environment.reset(task, 0)
    try:
        return await environment.step(text)
    finally:
        await environment.close()


async def test_a_query_is_answered_with_what_it_gives(database: Path) -> None:
    result = await said(database.parents[1], "SELECT 1", "let me see <sql>SELECT name, price FROM items</sql>")
    (observation,) = result.messages
    assert observation["content"] == ("<observation> name | price\npen | 1.5\nink | 4.0\nnib | NULL </observation>")
    assert (result.reward, result.done, result.info) == (0.0, False, {"queries": 1.0})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<sql>SELECT colour FROM items</sql>", "error : no such column: colour"),
        ("<sql>DROP TABLE items</sql>", "error : not authorized"),
        ("I think so", "give <sql> or <solution>"),
    ],
)
async def test_what_is_no_query_is_answered_with_the_reason(database: Path, text: str, wanted: str) -> None:
    result = await said(database.parents[1], "SELECT 1", text)
    assert result.messages[0]["content"] == f"<observation> {wanted} </observation>"


NAMES = "SELECT name FROM items"


@pytest.mark.parametrize(
    ("truth", "solution", "wanted"),
    [
        (NAMES, "SELECT name FROM items ORDER BY name DESC", 1.0),
        (f"{NAMES} ORDER BY name", "SELECT name FROM items ORDER BY name DESC", 0.0),
        (f"{NAMES} ORDER BY name", "SELECT name AS other FROM items ORDER BY 1", 1.0),
        (NAMES, "SELECT DISTINCT name FROM items UNION ALL SELECT 'pen'", 0.0),
        ("SELECT count(*) FROM items", "SELECT 3.0", 1.0),
        ("SELECT avg(price) FROM items", "SELECT 2.75000001", 1.0),
        ("SELECT avg(price) FROM items", "SELECT 2.76", 0.0),
        (NAMES, "SELECT nothing", 0.0),
        (NAMES, "", 0.0),
        (NAMES, ENDLESS.replace("count(*)", "i"), 0.0),
    ],
)
async def test_a_solution_is_right_where_it_gives_the_rows_of_the_true_query(
    database: Path, truth: str, solution: str, wanted: float
) -> None:
    result = await said(database.parents[1], truth, f"<solution>{solution}</solution>")
    assert (result.reward, result.done) == (wanted, True)


@pytest.mark.parametrize("db_id", ["../shop/shop", "", "missing", "/etc/passwd", ".."])
async def test_a_database_is_named_and_not_reached_by_a_path(database: Path, db_id: str) -> None:
    environment, task = episode(database.parents[1], "SELECT 1", db_id)
    with pytest.raises(ValueError, match="database"):
        await environment.reset(task, 0)


def test_the_database_that_comes_with_baton_is_the_one_its_module_makes(tmp_path: Path) -> None:
    data.write_database(tmp_path / "towns.sqlite")
    assert dump(data.DATABASE) == dump(tmp_path / "towns.sqlite")
    assert database_file(data.DATABASE.parent, "towns") == data.DATABASE


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


async def test_made_questions_are_solved_by_their_own_queries_and_not_by_the_wrong_ones() -> None:
    rng = np.random.default_rng(0)
    rewards: dict[str, list[float]] = {"sql": [], "wrong": []}
    shared = QueryProcesses.join()  # else every episode starts a process
    for _ in range(60):
        asked = text_to_sql.question(rng)
        for kind, given in (("sql", asked.sql), ("wrong", asked.wrong)):
            environment, task = episode(data.DATABASE.parent, asked.sql, "towns")
            await environment.reset(task, 0)
            rewards[kind].append((await environment.step(f"<solution> {given} </solution>")).reward)
            await environment.close()
    await shared.leave()
    assert np.mean(rewards["sql"]) == 1.0
    assert np.mean(rewards["wrong"]) < 0.3  # a few coincide, where only one town lies on the river


def test_the_made_vocabulary_covers_questions_demonstrations_and_observations() -> None:
    words = set(text_to_sql.vocabulary())
    shown = text_to_sql.demonstrations(200, 0.5, np.random.default_rng(0))
    assert {word for messages in shown for m in messages for word in m["content"].split()} <= words


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.glob("**/*-journal"))


@pytest.mark.parametrize("sql", ["SELECT fts3_tokenizer('simple')", "SELECT FTS3_Tokenizer('simple', x'00')"])
def test_a_query_neither_reads_nor_writes_addresses_of_the_process(database: Path, sql: str) -> None:
    with pytest.raises(QueryFailed, match=r"not authorized|no such function"):
        read(database, sql, 10)
