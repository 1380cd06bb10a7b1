"""Datasets: one prompt per row, in JSONL or parquet, with the columns of SkyRL and verl.

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": "42"}, "extra_info": {"index": 7}, "data_source": "openai/gsm8k"}

`prompt` is required (a plain text is one user message). verl's `reward_model` is read as `reward_spec`. `uid` names the
row in logs and journals; the default is the file's name and the row's number. `tools` (JSON schemas) go into the chat
template, and `temperature` replaces the configured one. All other columns join `extra_info`. Texts, depth and size of a
row are checked as those of an environment's answers are.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from service.config.rollout import COLDEST, HOTTEST
from service.errors import RunFailed, UserError
from service.files import atomic_file
from service.rollout.environment import Message, Task, is_text
from service.rollout.plain_values import Copier, NotPlain

COLUMNS = frozenset({"uid", "prompt", "env_class", "reward_spec", "reward_model", "extra_info", "tools", "temperature"})

ENCODED = frozenset({"uid", "prompt", "env_class", "tools"})
"""Columns whose texts go into prompts, logs and journals: UTF-8 has to encode them."""
COLUMN_CHARACTERS = 1 << 24
"""Most characters of one column of a row."""
COLUMN_TYPES = (bytes, date, time, timedelta, Decimal)
"""Types of parquet columns beside those of JSON."""
MAX_UID_LENGTH = 512
"""Characters; a message to the buffer has the uid of every step in its header, whose size is limited."""


def load_tasks(path: Path) -> list[Task]:
    """Every row of the file, in order; an empty `env_class` means the configured environment.

    Raises:
        UserError: the file or a row is malformed; the message names row and column.
    """
    return tasks_of(read_rows(path), path)


def task_of(tasks: Sequence[Task], uid: str, row: int) -> Task:
    """The task of a row, which must be the prompt `uid`.

    Raises:
        RunFailed: it is another one.
    """
    if tasks[row].uid != uid:
        named = f"row {row} of the dataset is {tasks[row].uid}, but the buffer means {uid}"
        raise RunFailed(f"{named}: the dataset changed under the run")
    return tasks[row]


def tasks_of(rows: Sequence[Any], path: Path) -> list[Task]:
    """The rows of `path` as tasks; see `load_tasks`."""
    if not rows:
        raise UserError(f"dataset {path}: there are no rows; give at least one prompt")
    tasks = []
    first_rows: dict[str, int] = {}
    for number, columns in enumerate(rows):
        if not isinstance(columns, Mapping):
            raise UserError(f"dataset {path}, row {number}: a row is an object with columns, not {columns!r:.80}")
        row = _Row(columns, number, path)
        task = row.task()
        if len(task.uid) > MAX_UID_LENGTH:
            raise row.error("uid", f"{len(task.uid)} characters are more than {MAX_UID_LENGTH}; give a short one")
        if (first := first_rows.setdefault(task.uid, number)) != number:
            raise row.error("uid", f"{task.uid!r} is the uid of row {first} too")
        tasks.append(task)
    return tasks


def rows_digest(tasks: Sequence[Task]) -> str:
    """Changes when the content of a row, or the order of the rows, changes."""
    digest, names = xxhash.xxh3_64(), [field.name for field in fields(Task)]
    for task in tasks:
        row = {name: getattr(task, name) for name in names}
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSONL; an existing file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            try:
                line = json.dumps(row, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:  # another type, a cycle, too deep
                raise UserError(f"dataset {path}, row {number}: a value cannot be written as JSON: {error}") from error
            # Half a surrogate pair cannot be encoded as UTF-8, but JSON can escape it.
            file.write(f"{line if is_text(line) else json.dumps(row)}\n")


def read_rows(path: Path) -> list[Any]:
    """The rows of a JSONL or parquet file, unchecked.

    Raises:
        UserError: the file does not exist, or cannot be read.
    """
    if not path.is_file():
        raise UserError(f"dataset {path}: there is no such file")
    if path.suffix == ".parquet":
        try:
            return list(pq.read_table(path).to_pylist())
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            # pyarrow's errors differ between broken bytes and values out of Python's range, such as the year 300000.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"dataset {path}: no parquet file that can be read: {reason}") from error
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    raise UserError(f"dataset {path}: it ends in {path.suffix!r}; give a .jsonl or a .parquet file")


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"dataset {path}: not UTF-8: {error}") from error
    except OSError as error:
        raise UserError(f"dataset {path}: cannot be read: {error.strerror}") from error
    for line in filter(str.strip, lines):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"dataset {path}, row {len(rows)}: no JSON: {error}") from error
    return rows


class _Row:
    """The columns of one row, checked while they are read; errors name file, row and column."""

    def __init__(self, columns: Mapping[str, Any], number: int, path: Path) -> None:
        self._number = number
        self._path = path
        self._columns = {str(column): self._plain(str(column), value) for column, value in columns.items()}

    def error(self, column: str, problem: str) -> UserError:
        return UserError(f"dataset {self._path}, row {self._number}, column {column}: {problem}")

    def _plain(self, column: str, value: Any) -> Any:
        try:
            return Copier(COLUMN_CHARACTERS, COLUMN_TYPES, any_text=column not in ENCODED).copy(value)
        except NotPlain as refused:
            raise self.error(column, str(refused).strip()) from refused

    def task(self) -> Task:
        others = {column: value for column, value in self._columns.items() if column not in COLUMNS}
        return Task(
            uid=self._text("uid") or f"{self._path.stem}-{self._number}",
            prompt=self._prompt(),
            env_class=self._text("env_class"),
            reward_spec=self._mapping("reward_spec") or self._mapping("reward_model"),
            extra_info=others | self._mapping("extra_info"),
            tools=self._tools(),
            temperature=self._temperature(),
        )

    def _prompt(self) -> tuple[Message, ...]:
        value = self._columns.get("prompt")
        if isinstance(value, str) and value:
            value = [{"role": "user", "content": value}]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            wanted = "a text or a list of messages with role and content"
            near = difflib.get_close_matches("prompt", [column for column in self._columns if column != "prompt"], n=1)
            hint = f" (there is a column {near[0]!r})" if near else ""
            raise self.error("prompt", f"is missing{hint}; give {wanted}" if not value else f"give {wanted}")
        return tuple(self._message(message, i) for i, message in enumerate(value))

    def _message(self, value: Any, i: int) -> Message:
        if not isinstance(value, Mapping):
            raise self.error("prompt", f"message {i} is no object with role and content")
        for key in ("role", "content"):
            if not isinstance(value.get(key), str):
                raise self.error("prompt", f"message {i} has no text as {key}")
        return Message(role=value["role"], content=value["content"])

    def _mapping(self, column: str) -> dict[str, Any]:
        value = self._columns.get(column)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(column, f"give an object, not {value!r:.80}")
        return dict(value or {})

    def _tools(self) -> tuple[Mapping[str, Any], ...]:
        value = self._columns.get("tools")
        try:
            tools = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
        except (ValueError, RecursionError) as error:
            raise self.error("tools", f"no JSON: {error}") from error
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise self.error("tools", f"give a list of JSON schemas, not {value!r:.80}")
        return tuple(self._plain("tools", tools) or ())

    def _temperature(self) -> float | None:
        value = self._columns.get("temperature")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not COLDEST <= value < HOTTEST:
            raise self.error("temperature", f"give a number from {COLDEST:g} to {HOTTEST:g}, not {value!r:.80}")
        return float(value)

    def _text(self, column: str) -> str:
        value = self._columns.get(column)
        if value is not None and not isinstance(value, str):
            raise self.error(column, f"give a text, not {value!r:.80}")
        return value or ""
