"""Runs a policy's SQL in read-only mode: statements cannot change data, load code, or exhaust time or memory.

Statements run in a few child processes, one at a time in each. If a statement takes too long, the kernel ends its
process; it also denies memory beyond the limit. The next statement gets a new process. `python -m
service.rollout.child_main baton.examples.sqlite_query` is the command of such a process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import sqlite3
from asyncio import AbstractEventLoop
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from baton import ChildDied, ChildProcesses, serve_child

PROCESSES = min(max(2, os.cpu_count() or 1), 16)
"""Maximum number of processes that run statements at once; further statements wait for their turn."""
MEMORY = 512 << 20
"""Maximum bytes of address space of a process."""
TEMPORARY_FILE = 1 << 30
"""Maximum bytes of one temporary file; a large sort writes temporary files, for example."""
ANSWER = 1 << 24
"""Maximum bytes of a result as JSON."""
SHOWN_CHARACTERS = 80
"""Maximum characters of one cell in a result that is shown."""
OUT_OF_MEMORY = 3
"""Exit code of a process whose statement needed more than `MEMORY`."""

READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
FORBIDDEN = frozenset({"load_extension", "fts3_tokenizer"})
"""Functions that load code, or access the process's memory."""
LIMITS = {sqlite3.SQLITE_LIMIT_COLUMN: 200, sqlite3.SQLITE_LIMIT_ATTACHED: 0}

Cell = int | float | str | bytes | None


class QueryFailed(Exception):
    """Raised if a query is wrong, forbidden, too slow or too large. The message can be shown to the policy."""


@dataclass(frozen=True, slots=True)
class Result:
    """The first rows of a query's result; `truncated`: the result has more rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    truncated: bool


class QueryProcesses:
    """The processes that run statements for all open episodes of an event loop. The last episode that closes ends
    them."""

    _of_loop: ClassVar[WeakKeyDictionary[AbstractEventLoop, QueryProcesses]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._children = ChildProcesses("baton.examples.sqlite_query", ANSWER)
        self._room = asyncio.Semaphore(PROCESSES)
        self._episodes = 0

    @classmethod
    def join(cls) -> QueryProcesses:
        """Begin to use the processes of the running event loop, for one episode."""
        shared = cls._of_loop.setdefault(asyncio.get_running_loop(), cls())
        shared._episodes += 1
        return shared

    async def leave(self) -> None:
        """Stop using the processes, for one episode; the last episode ends the processes."""
        self._episodes -= 1
        if not self._episodes:
            del self._of_loop[asyncio.get_running_loop()]
            await self._children.close()

    async def shown(self, database: Path, sql: str, max_rows: int, seconds: float) -> str:
        """Run a statement in a child process. Returns the first rows of its result as the function `shown` writes them.

        Raises:
            QueryFailed: the statement is wrong, writes, or takes too much time or memory.
        """
        return str(await self._ask("shown", database, sql, max_rows, seconds))

    async def digest(self, database: Path, sql: str, max_rows: int, seconds: float, ordered: bool) -> str | None:
        """Run a statement in a child process. Returns the hash of its result, as the function `digest` makes it.

        Raises:
            QueryFailed: the statement is wrong, writes, or takes too much time or memory.
        """
        found: str | None = await self._ask("digest", database, sql, max_rows, seconds, ordered=ordered)
        return found

    async def _ask(self, verb: str, database: Path, sql: str, max_rows: int, seconds: float, **more: bool) -> Any:
        limits = {"max_rows": max_rows, "seconds": seconds}
        async with self._room:
            process = await self._children.take()
            try:
                answer = await process.ask({"verb": verb, "database": str(database), "sql": sql, **limits, **more})
            except ChildDied as died:
                ends: dict[int | None, str] = {
                    -signal.SIGALRM: f"the query took longer than {seconds:g} s",
                    OUT_OF_MEMORY: f"the query needs more than {MEMORY >> 20} MiB of memory",
                }
                raise QueryFailed(ends.get(died.code, str(died))) from died
            finally:
                self._children.give_back(process)
        if "failed" in answer:
            raise QueryFailed(answer["failed"])
        return answer["found"]


def read(database: Path, sql: str, max_rows: int) -> Result:
    """The first rows of a statement's result; runs in this process, without limits of time and memory.

    Raises:
        QueryFailed: the statement is wrong, or writes.
    """
    try:
        with closing(_open(database)) as connection:
            cursor = connection.execute(sql)
            rows = cursor.fetchmany(max_rows + 1)
            columns = tuple(column[0] for column in cursor.description or ())
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
        raise QueryFailed(str(error) or type(error).__name__) from error
    return Result(columns, rows[:max_rows], len(rows) > max_rows)


def _open(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    for limit, value in LIMITS.items():
        connection.setlimit(limit, value)
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    connection.set_authorizer(_authorize)
    return connection


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    calls_forbidden = action == sqlite3.SQLITE_FUNCTION and second is not None and second.lower() in FORBIDDEN
    return sqlite3.SQLITE_OK if action in READING and not calls_forbidden else sqlite3.SQLITE_DENY


def shown(result: Result) -> str:
    """A result as text: a line of column names, then one line per row; cells are separated by bars."""
    lines = [" | ".join(map(_shown_cell, row)) for row in (result.columns, *result.rows)]
    if result.truncated:
        lines.append(f"... only the first {len(result.rows)} rows")
    return "\n".join(lines)


def _shown_cell(cell: Cell) -> str:
    text = "NULL" if cell is None else str(cell)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def digest(result: Result, ordered: bool) -> str | None:
    """A hash of the rows. Two results with the same rows (if `ordered`, also in the same order) have equal hashes.

    Floats are rounded to six digits first. None if the result has more rows than were read.
    """
    rows = [repr(tuple(map(_comparable, row))) for row in result.rows]
    text = "\n".join(rows if ordered else sorted(rows))
    return None if result.truncated else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _comparable(cell: Cell) -> Cell:
    if not isinstance(cell, float):
        return cell
    rounded = float(f"{cell:.6g}")
    return int(rounded) if rounded.is_integer() else rounded


async def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run one statement. When its time is over, SIGALRM ends the process, which has no handler for it."""
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        result = read(Path(request["database"]), request["sql"], request["max_rows"])
        return {"found": shown(result) if request["verb"] == "shown" else digest(result, request["ordered"])}
    except QueryFailed as failed:
        return {"failed": str(failed)}
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Run one statement after the other until stdin closes; this is the main function of a child process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may ignore the signal
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (TEMPORARY_FILE, TEMPORARY_FILE))
    serve_child(_answer)
