"""Questions about a database: try queries, read their results, then give the final query.

    user: schema and question
    assistant: <sql> SELECT height FROM towns WHERE name = 'marn' </sql>
    user: <observation> height 12 </observation>
    assistant: <solution> SELECT height FROM towns WHERE name = 'marn' </solution>     done

The reward is 1 if the solution returns the same rows as the query in `reward_spec.ground_truth`; the order of the rows
counts only if the query in `ground_truth` has an ORDER BY. `extra_info.db_id` names the database under `databases`. The
synthetic rows ask about the database in `baton.examples.data`, in words of a small vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baton import Message, StepResult, Task, is_text, tagged
from baton.examples import data
from baton.examples.sqlite_query import QueryFailed, QueryProcesses, read, shown

DATABASES = Path(__file__).parent / "data" / "databases"
"""The folder of the demonstration's database."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
JUDGED_ROWS = 10_000
"""Maximum rows of a solution's result; a longer result scores 0."""


class TextToSql:
    """The environment: an object plays one episode, with one question about one database."""

    def __init__(self, databases: str = str(DATABASES), seconds: float = 5.0, shown_rows: int = 20) -> None:
        self._databases = Path(databases).absolute()  # another environment may change the current folder
        self._seconds = seconds
        self._shown_rows = shown_rows
        self._queries: QueryProcesses | None = None

    def check_task(self, task: Task) -> None:
        """Raises if the row has no query as `ground_truth` or no valid `db_id`; the database file is not checked."""
        _check_name(str(task.extra_info["db_id"]))
        if not is_text(task.reward_spec["ground_truth"]):
            raise ValueError("ground_truth is no text")

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """The row's prompt; raises if the database is missing."""
        self._database = database_file(self._databases, str(task.extra_info["db_id"]))
        self._truth = str(task.reward_spec["ground_truth"])
        self._queries = QueryProcesses.join()
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Run a query, or score a solution."""
        if self._queries is None:
            raise RuntimeError("step before reset")
        solutions = tagged(text, "solution")
        if solutions:
            right = await self._is_right(self._queries, solutions[-1][1])
            return StepResult((), float(right), True, {"solved": float(right)})
        queries = tagged(text, "sql")
        text = await self._observation(self._queries, queries[-1][1]) if queries else "give <sql> or <solution>"
        observation = Message(role="user", content=f"<observation> {text} </observation>")
        return StepResult([observation], 0.0, False, {"queries": 1.0 if queries else 0.0})

    async def close(self) -> None:
        """Stop using the processes that run queries."""
        if self._queries is not None:
            queries, self._queries = self._queries, None
            await queries.leave()

    async def _observation(self, queries: QueryProcesses, sql: str) -> str:
        try:
            return await queries.shown(self._database, sql, self._shown_rows, self._seconds)
        except QueryFailed as failed:
            return f"error : {failed}"

    async def _is_right(self, queries: QueryProcesses, sql: str) -> bool:
        ordered = "order by" in self._truth.lower()
        truth = await queries.digest(self._database, self._truth, JUDGED_ROWS, self._seconds, ordered)
        try:
            given = await queries.digest(self._database, sql, JUDGED_ROWS, self._seconds, ordered)
        except QueryFailed:
            return False
        return truth is not None and truth == given


def database_file(folder: Path, db_id: str) -> Path:
    """The file of a database: `<db_id>.sqlite`, or `<db_id>/<db_id>.sqlite` as in BIRD and Spider.

    Raises:
        ValueError: the id is malformed, or there is no such file.
    """
    _check_name(db_id)
    for path in (folder / f"{db_id}.sqlite", folder / db_id / f"{db_id}.sqlite"):
        if path.is_file():
            return path
    raise ValueError(f"there is no database {db_id!r} in {folder}")


def _check_name(db_id: str) -> None:
    if not NAME.fullmatch(db_id):
        raise ValueError(f"db_id {db_id!r:.80} is no name of a database")


DB_ID = "towns"
COLUMNS = ("people", "height")
TAGS = ("<sql>", "</sql>", "<solution>", "</solution>", "<observation>", "</observation>")
QUESTION_WORDS = (
    *("what", "is", "the", "of", "?", "how", "many", "towns"),
    *("are", "on", "which", "town", "has", "most", "river"),
)
SQL_WORDS = ("SELECT", "FROM", "WHERE", "=", "COUNT", "(", "*", ")", "ORDER", "BY", "DESC", "LIMIT", "1", "error", ":")


class SqlQuestion(NamedTuple):
    """A question in words and as a query; `wrong` is the query of another question."""

    text: str
    sql: str
    wrong: str


def question(rng: np.random.Generator) -> SqlQuestion:
    """Draw a question of one of three kinds: a town's number of people or height; the number of towns on a river; or
    the town on a river with the most people or the greatest height."""
    drawn = data.geography()
    town = drawn.towns[int(rng.integers(len(drawn.towns)))]
    asked, other = (COLUMNS[i] for i in rng.permutation(len(COLUMNS)))
    towns_on = f"FROM towns WHERE river = {quoted(town.river)}"
    match int(rng.integers(3)):
        case 0:
            of_town = f"FROM towns WHERE name = {quoted(town.name)}"
            text = f"what is the {asked} of {town.name} ?"
            return SqlQuestion(text, f"SELECT {asked} {of_town}", f"SELECT {other} {of_town}")
        case 1:
            text = f"how many towns are on the river {town.river} ?"
            return SqlQuestion(text, f"SELECT COUNT ( * ) {towns_on}", f"SELECT people {towns_on}")
        case _:
            text = f"which town on the river {town.river} has the most {asked} ?"
            first = f"SELECT name {towns_on} ORDER BY"
            return SqlQuestion(text, f"{first} {asked} DESC LIMIT 1", f"{first} {other} LIMIT 1")


def quoted(name: str) -> str:
    """The name as a text literal of SQL: in single quotes."""
    return f"'{name}'"


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` questions as dataset rows, with the schema in the prompt."""
    rng = np.random.default_rng(seed)
    return [
        {
            "uid": f"text_to_sql-{seed}-{i}",
            "data_source": "baton/towns",
            "prompt": [_prompt(asked)],
            "env_class": "text_to_sql",
            "reward_spec": {"method": "rule", "ground_truth": asked.sql},
            "extra_info": {"db_id": DB_ID},
        }
        for i, asked in enumerate(question(rng) for _ in range(n))
    ]


def _prompt(asked: SqlQuestion) -> Message:
    return Message(role="user", content=" ".join([*data.SCHEMA, asked.text]))


def vocabulary() -> tuple[str, ...]:
    """Every word of the questions, the queries and the database's answers."""
    names = data.names()
    numbers = tuple(str(i) for i in range(data.LARGEST + 1))
    schema = " ".join(data.SCHEMA).split()
    return (*TAGS, *QUESTION_WORDS, *SQL_WORDS, *schema, *names, *map(quoted, names), *numbers, "COUNT(*)", "|", "NULL")


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations. Each tries a query, then gives the query as the solution; about `right_fraction` of the
    queries are right."""
    return [_demonstration(question(rng), rng.random() < right_fraction) for _ in range(n)]


def _demonstration(asked: SqlQuestion, right: bool) -> list[Message]:
    sql = asked.sql if right else asked.wrong
    observation = shown(read(database_file(DATABASES, DB_ID), sql, JUDGED_ROWS))
    return [
        _prompt(asked),
        Message(role="assistant", content=f"<sql> {sql} </sql>"),
        Message(role="user", content=f"<observation> {observation} </observation>"),
        Message(role="assistant", content=f"<solution> {sql} </solution>"),
    ]
