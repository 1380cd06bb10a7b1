"""Datasets: a row a prompt, in JSONL or parquet, with the columns that SkyRL and verl write.

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": "42"}, "extra_info": {"index": 7}, "data_source": "openai/gsm8k"}

`prompt` is required (a plain text is one user message). verl's `reward_model` is read as `reward_spec`. `uid` names the
row in logs and journals; without it the row's number does. `tools` (JSON schemas) go into the chat template, and
`temperature` replaces the configured one. Columns of any other name join `extra_info`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from service.config.rollout import COLDEST, HOTTEST
from service.errors import UserError
from service.files import atomic_file
from service.rollout.environment import Message, Task, is_text

COLUMNS = frozenset({"uid", "prompt", "env_class", "reward_spec", "reward_model", "extra_info", "tools", "temperature"})

MAX_UID_LENGTH = 512
"""Characters; every message names the prompts of its steps, and the buffer takes messages with short names only."""


def load_tasks(path: Path) -> list[Task]:
    """Every row of the file, in its order; an empty `env_class` means the configured environment.

    Raises:
        UserError: the file or a row is malformed; the message names row and column.
    """
    return tasks_of(read_rows(path), path)


def tasks_of(rows: Sequence[Any], path: Path) -> list[Task]:
    """The rows of `path` as tasks; see `load_tasks`."""
    tasks = [_task(row, number, path) for number, row in enumerate(rows)]
    if not tasks:
        raise UserError(f"dataset {path}: there are no rows; give at least one prompt")
    seen: dict[str, int] = {}
    for number, task in enumerate(tasks):
        if len(task.uid) > MAX_UID_LENGTH:
            raise _bad(
                path, number, "uid", f"{len(task.uid)} characters are more than {MAX_UID_LENGTH}; give a short one"
            )
        if task.uid in seen:
            raise _bad(path, number, "uid", f"{task.uid!r} is the uid of row {seen[task.uid]} too")
        seen[task.uid] = number
    return tasks


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSONL; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(f"{_line(row, number, path)}\n" for number, row in enumerate(rows))


def _line(row: Mapping[str, Any], number: int, path: Path) -> str:
    try:
        line = json.dumps(row, ensure_ascii=False)
        # Half a surrogate pair is no text, but as JSON it can be written.
        return line if is_text(line) else json.dumps(row)
    except TypeError as error:
        raise UserError(f"dataset {path}, row {number}: a value cannot be written as JSON: {error}") from error


def read_rows(path: Path) -> list[Any]:
    """The rows of a JSONL or parquet file as they stand there.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise UserError(f"dataset {path}: there is no such file")
    if path.suffix == ".parquet":
        try:
            return list(pq.read_table(path).to_pylist())
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            # What pyarrow raises depends on whether bytes or values are broken: a date of the year 300000 is none.
            raise UserError(f"dataset {path}: no parquet file that can be read: {_in_a_line(error)}") from error
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    raise UserError(f"dataset {path}: it ends in {path.suffix!r}; give a .jsonl or a .parquet file")


def _in_a_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # some editors begin a file with a mark
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


def _task(row: Any, number: int, path: Path) -> Task:
    if not isinstance(row, Mapping):
        raise UserError(f"dataset {path}, row {number}: a row is an object with columns, not {row!r:.80}")
    reward_spec = _mapping(row, "reward_spec", number, path) or _mapping(row, "reward_model", number, path)
    others = {column: value for column, value in row.items() if column not in COLUMNS}
    return Task(
        uid=_text(row, "uid", number, path) or f"{path.stem}-{number}",
        prompt=_prompt(row, number, path),
        env_class=_text(row, "env_class", number, path),
        reward_spec=reward_spec,
        extra_info=others | _mapping(row, "extra_info", number, path),
        tools=_tools(row.get("tools"), number, path),
        temperature=_temperature(row.get("temperature"), number, path),
    )


def _prompt(row: Mapping[str, Any], number: int, path: Path) -> tuple[Message, ...]:
    value = row.get("prompt")
    if isinstance(value, str) and value:
        value = [{"role": "user", "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        wanted = "a text or a list of messages with role and content"
        near = difflib.get_close_matches("prompt", [column for column in row if column != "prompt"], n=1)
        hint = f" (there is a column {near[0]!r})" if near else ""
        raise _bad(path, number, "prompt", f"is missing{hint}; give {wanted}" if not value else f"give {wanted}")
    return tuple(_message(message, i, number, path) for i, message in enumerate(value))


def _message(value: Any, i: int, number: int, path: Path) -> Message:
    if not isinstance(value, Mapping):
        raise _bad(path, number, "prompt", f"message {i} is no object with role and content")
    for key in ("role", "content"):
        if not isinstance(value.get(key), str):
            raise _bad(path, number, "prompt", f"message {i} has no text as {key}")
        if not is_text(value[key]):
            raise _bad(path, number, "prompt", f"message {i} has half a surrogate pair in its {key}, which is no text")
    return Message(role=value["role"], content=value["content"])


def _mapping(row: Mapping[str, Any], column: str, number: int, path: Path) -> dict[str, Any]:
    value = row.get(column)
    if value is not None and not isinstance(value, Mapping):
        raise _bad(path, number, column, f"give an object, not {value!r:.80}")
    return dict(value or {})


def _tools(value: Any, number: int, path: Path) -> tuple[Mapping[str, Any], ...]:
    try:
        tools = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    except (ValueError, RecursionError) as error:
        raise _bad(path, number, "tools", f"no JSON: {error}") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise _bad(path, number, "tools", f"give a list of JSON schemas, not {value!r:.80}")
    if tools and not is_text(json.dumps(tools, ensure_ascii=False, default=str)):
        raise _bad(path, number, "tools", "holds half a surrogate pair, which is no text")
    return tuple(tools or ())


def _temperature(value: Any, number: int, path: Path) -> float | None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not COLDEST <= value < HOTTEST
    ):
        raise _bad(path, number, "temperature", f"give a number from {COLDEST:g} to {HOTTEST:g}, not {value!r:.80}")
    return None if value is None else float(value)


def _text(row: Mapping[str, Any], column: str, number: int, path: Path) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise _bad(path, number, column, f"give a text, not {value!r:.80}")
    if value and not is_text(value):
        raise _bad(path, number, column, f"{value!r:.80} holds half a surrogate pair, which is no text")
    return value or ""


def _bad(path: Path, number: int, column: str, problem: str) -> UserError:
    return UserError(f"dataset {path}, row {number}, column {column}: {problem}")
