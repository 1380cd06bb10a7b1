"""Runs a policy's SQL read-only: a statement can change nothing, load no code and exhaust neither time nor memory."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from service.clock import Clock, SystemClock

READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
INSTRUCTIONS_BETWEEN_LOOKS = 100
"""Virtual machine instructions between two checks of the query's deadline."""
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 200_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
"""Sizes of values, statements and patterns, whose handling the deadline cannot interrupt."""

FORBIDDEN = frozenset({"load_extension", "fts3_tokenizer"})
"""Functions that load code, or access this process's memory."""
SEARCHING = frozenset({"instr", "replace", "trim", "ltrim", "rtrim"})
"""Functions that take up to the product of their arguments' lengths, which the deadline cannot interrupt."""
MOST_SEARCHES = 10
"""Most calls of such functions in one statement."""

CLOCK = SystemClock()

Cell = int | float | str | bytes | None


class QueryFailed(Exception):
    """The query is wrong, forbidden, too slow or too large; the message can be shown to the policy."""


@dataclass(frozen=True, slots=True)
class Result:
    """Rows of a query, up to the limit."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """Runs one statement at a time against a database file that it opens read-only."""

    seconds: float = 5.0
    """Seconds that a query may take."""
    max_rows: int = 1000
    max_bytes: int = 8 << 20
    """Bytes of text and blobs in one result."""
    clock: Clock = CLOCK

    def query(self, database: Path, sql: str) -> Result:
        """The first rows of a statement's result.

        Raises:
            QueryFailed: the statement is wrong, writes, or takes too much time or memory.
        """
        try:
            with closing(self._open(database)) as connection:
                cursor = connection.execute(sql)
                rows = self._fetch(cursor)
                columns = tuple(column[0] for column in cursor.description or ())
        except (sqlite3.Error, sqlite3.Warning) as error:
            late = f"the query took longer than {self.seconds:g} s"
            raise QueryFailed(late if str(error) == "interrupted" else str(error)) from error
        except (MemoryError, OverflowError, ValueError) as error:  # a value or statement too large for Python
            raise QueryFailed(str(error) or type(error).__name__) from error
        return Result(columns, rows[: self.max_rows], len(rows) > self.max_rows)

    def _fetch(self, cursor: sqlite3.Cursor) -> list[tuple[Cell, ...]]:
        rows: list[tuple[Cell, ...]] = []
        size = 0
        for row in cursor:
            rows.append(row)
            size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
            if size > self.max_bytes:
                raise QueryFailed(f"the result is larger than {self.max_bytes} bytes")
            if len(rows) > self.max_rows:
                break
        return rows

    def _open(self, database: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.text_factory = partial(str, encoding="utf-8", errors="replace")
        deadline = self.clock.monotonic() + self.seconds
        connection.set_progress_handler(lambda: self.clock.monotonic() > deadline, INSTRUCTIONS_BETWEEN_LOOKS)
        connection.set_authorizer(_Authorizer())
        return connection


class _Authorizer:
    """Allows one statement to read, and to call functions that are harmless and fast."""

    def __init__(self) -> None:
        self._searches = 0

    def __call__(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action not in READING:
            return sqlite3.SQLITE_DENY
        name = second.lower() if action == sqlite3.SQLITE_FUNCTION and second is not None else ""
        self._searches += name in SEARCHING
        return sqlite3.SQLITE_DENY if name in FORBIDDEN or self._searches > MOST_SEARCHES else sqlite3.SQLITE_OK
