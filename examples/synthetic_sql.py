"""Synthetic questions about the database in `examples.data`, in words of a small vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from examples import data
from examples.sqlite_query import Reader
from examples.text_to_sql import DATABASES, database_file, shown
from service.rollout.environment import Message

DB_ID = "towns"
SCHEMA = (
    "regions ( name TEXT , good TEXT )",
    "rivers ( name TEXT , region TEXT )",
    "towns ( name TEXT , river TEXT , people INTEGER , height INTEGER )",
)
COLUMNS = ("people", "height")
TAGS = ("<sql>", "</sql>", "<solution>", "</solution>", "<observation>", "</observation>")
QUESTION_WORDS = (
    *("what", "is", "the", "of", "?", "how", "many", "towns"),
    *("are", "on", "which", "town", "has", "most", "river"),
)
SQL_WORDS = ("SELECT", "FROM", "WHERE", "=", "COUNT", "(", "*", ")", "ORDER", "BY", "DESC", "LIMIT", "1", "error", ":")


class SqlQuestion(NamedTuple):
    """A question in words and as a query; `wrong` is a query for another question."""

    text: str
    sql: str
    wrong: str


def question(rng: np.random.Generator) -> SqlQuestion:
    """One of three kinds: a town's number, how many towns lie on a river, which town on a river has the most."""
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
    """A name as a text in SQL."""
    return f"'{name}'"


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` questions as dataset rows, with the schema in the prompt."""
    rng = np.random.default_rng(seed)
    return [_row(question(rng), f"text_to_sql-{seed}-{i}") for i in range(n)]


def _row(asked: SqlQuestion, uid: str) -> dict[str, Any]:
    return {
        "uid": uid,
        "data_source": "baton/towns",
        "prompt": [_prompt(asked)],
        "env_class": "text_to_sql",
        "reward_spec": {"method": "rule", "ground_truth": asked.sql},
        "extra_info": {"db_id": DB_ID},
    }


def _prompt(asked: SqlQuestion) -> Message:
    return Message(role="user", content=" ".join([*SCHEMA, asked.text]))


def vocabulary() -> tuple[str, ...]:
    """Every word of the questions, the queries and the database's answers."""
    names = data.names()
    numbers = tuple(str(i) for i in range(data.LARGEST + 1))
    schema = " ".join(SCHEMA).split()
    return (*TAGS, *QUESTION_WORDS, *SQL_WORDS, *schema, *names, *map(quoted, names), *numbers, "COUNT(*)", "|", "NULL")


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` conversations that try a query, then give it as the solution; about `right_fraction` are right."""
    return [_demonstration(question(rng), rng.random() < right_fraction) for _ in range(n)]


def _demonstration(asked: SqlQuestion, right: bool) -> list[Message]:
    sql = asked.sql if right else asked.wrong
    observation = shown(Reader().query(database_file(DATABASES, DB_ID), sql))
    return [
        _prompt(asked),
        Message(role="assistant", content=f"<sql> {sql} </sql>"),
        Message(role="user", content=f"<observation> {observation} </observation>"),
        Message(role="assistant", content=f"<solution> {sql} </solution>"),
    ]
