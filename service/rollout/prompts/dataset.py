"""Reads datasets from JSONL or parquet: one prompt per row, with the columns of SkyRL and verl.

    {"prompt": [{"role": "user", "content": "..."}], "env_class": "gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": "42"}, "extra_info": {"index": 7}, "data_source": "openai/gsm8k"}

`prompt` is required; a plain text counts as one user message, and messages keep all their fields. A column of messages
or objects may also hold them as JSON text. verl's column `reward_model` is read as `reward_spec`. `uid` names the row
in logs and journals; the default is the file's name and the row's number. `tools` (JSON schemas) go into the chat
template, and `temperature` replaces the configured value. All other columns are added to `extra_info`. A row must have
texts that UTF-8 can encode, and a bounded depth and size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from service.config.rollout import COLDEST, HOTTEST
from service.errors import RunFailed, UserError
from service.rollout.chat.tools import MAX_DEPTH, is_shallow
from service.rollout.environment import Message, Task
from service.rollout.exact_json import exact_json
from service.rollout.prompts.rows import messages_of, read_rows, row_place, without_gc

NULL = re.compile(rb"[:\[,]null[,\]}]")
"""A null in JSON; rarely a part of a text."""
ENCODED = frozenset({"uid", "prompt", "env_class", "tools"})
"""Columns whose texts must be valid UTF-8, because they are written to prompts, logs and journals."""
OBJECTS = {"tools": "[", "reward_spec": "{", "reward_model": "{", "extra_info": "{"}
"""Columns that may be JSON text; for each, the character with which the text begins."""
COLUMN_BYTES = 1 << 24
"""Maximum bytes of one column in one row, as JSON."""
MAX_UID_LENGTH = 512
"""Maximum characters of a uid. The header of a message to the buffer lists the uid of every step, and its size is
limited."""


def load_tasks(path: Path | str) -> list[Task]:
    """All rows of a data set as tasks, in order; an empty `env_class` means the configured environment.

    Raises:
        UserError: the file or a row is malformed; the message names row and column.
    """
    return tasks_of(read_rows(Path(path)), Path(path))


def task_of(tasks: Sequence[Task], uid: str, row: int) -> Task:
    """The task of row number `row`, after a check that its uid is `uid`.

    Raises:
        RunFailed: the row has another uid.
    """
    if tasks[row].uid != uid:
        named = f"row {row} of the dataset is {tasks[row].uid}, but the buffer means {uid}"
        raise RunFailed(f"{named}: the dataset changed under the run")
    return tasks[row]


@without_gc()
def tasks_of(rows: Sequence[Any], path: Path) -> list[Task]:
    """Convert the rows of the data set `path` to tasks; errors as in `load_tasks`."""
    if not rows:
        raise UserError(f"dataset {path}: there are no rows; give at least one prompt")
    tasks, stem = [], path.stem
    first_rows: dict[str, int] = {}
    for number, columns in enumerate(rows):
        if not isinstance(columns, Mapping):
            raise UserError(f"{row_place(path, number)}: a row is an object with columns, not {columns!r:.80}")
        task = _task(columns, number, path, f"{stem}-{number}")
        if (first := first_rows.setdefault(task.uid, number)) != number:
            raise _error(path, number, "uid", f"{task.uid!r} is the uid of row {first} too")
        tasks.append(task)
    return tasks


def rows_digest(tasks: Sequence[Task]) -> str:
    """A hash of the content and order of the rows."""
    digest, names = xxhash.xxh3_64(), [field.name for field in fields(Task)]
    write = json.JSONEncoder(sort_keys=True, default=str).encode
    for task in tasks:
        digest.update(write({name: getattr(task, name) for name in names}).encode())
    return digest.hexdigest()


class _RowColumns(msgspec.Struct):
    """The columns that Baton reads; other columns are added to `extra_info`."""

    prompt: str | list[Message]
    uid: Annotated[str, msgspec.Meta(max_length=MAX_UID_LENGTH)] | None = None
    env_class: str | None = None
    reward_spec: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    extra_info: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=COLDEST, le=HOTTEST)] | None = None


READ = frozenset(_RowColumns.__struct_fields__)
TEXTS = frozenset({"prompt", *OBJECTS})


def _task(columns: Mapping[Any, Any], number: int, path: Path, uid: str) -> Task:
    """The task of a checked row; errors name file, row and column. `uid`: the uid if the row has none."""
    plain = {str(column): value for column, value in columns.items()}
    for column in TEXTS & plain.keys():
        try:
            plain[column] = _read_text(column, plain[column])
        except (ValueError, RecursionError) as error:
            why = f"no JSON: {error}" if isinstance(error, json.JSONDecodeError | RecursionError) else str(error)
            raise _error(path, number, column, why) from error
    _check_sizes(plain, number, path)
    if not plain.get("prompt"):
        hint = "" if "prompt" in plain else f" (the row has {', '.join(plain):.80}: data.columns names the column)"
        raise _error(path, number, "prompt", f"is missing{hint}; give a text or a list of messages")
    try:
        row = msgspec.convert(plain, _RowColumns)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).rstrip("`").partition(" - at `$.")
        column, _, inner = place.partition("[")
        where = f"[{inner}: " if inner else ""
        value = "" if inner else f", not {plain.get(column)!r:.80}"
        raise _error(path, number, column, f"{where}{problem}{value}") from error
    if row.reward_spec and row.reward_model and row.reward_spec != row.reward_model:
        raise _error(path, number, "reward_model", "differs from reward_spec, of which it is another name; give one")
    if isinstance(row.prompt, list) and row.prompt[-1]["role"] == "assistant":
        told = "ends with an answer of the assistant; leave the answer out, for the policy writes it"
        raise _error(path, number, "prompt", told)
    others, extra = {name: of for name, of in plain.items() if name not in READ}, row.extra_info or {}
    for name in others.keys() & extra.keys():
        if others[name] != extra[name]:
            raise _error(path, number, name, "differs from the value of this name in extra_info; rename one")
    return Task(
        uid=row.uid or uid,
        # Templates may read more fields of a message than the checks above know.
        prompt=(Message(role="user", content=row.prompt),) if isinstance(row.prompt, str) else tuple(plain["prompt"]),
        env_class=row.env_class or "",
        reward_spec=row.reward_spec or row.reward_model or {},
        extra_info=others | extra,
        tools=tuple(row.tools or ()),
        temperature=row.temperature,
    )


def _read_text(column: str, value: Any) -> Any:
    """The objects that a JSON text describes; any other value unchanged."""
    if column == "prompt":
        return messages_of(value)
    if column == "tools" and isinstance(value, list):
        return [exact_json(one) if isinstance(one, str) else one for one in value]
    is_json = isinstance(value, str) and value.lstrip().startswith(OBJECTS[column])
    return exact_json(value) if is_json else value


def _check_sizes(columns: Mapping[str, Any], number: int, path: Path) -> None:
    """Raise a UserError if a column is too large or nested too deeply, or holds NaN."""
    with suppress(UnicodeEncodeError, RecursionError):
        written = msgspec.json.encode(columns, enc_hook=str)
        has_null = b"null" in written and NULL.search(written)  # so msgspec writes NaN and infinity
        if len(written) <= COLUMN_BYTES and written.count(b"{") + written.count(b"[") <= MAX_DEPTH and not has_null:
            return
    for column, value in columns.items():
        if not is_shallow(value):
            raise _error(path, number, column, f"is nested too deeply; allowed are {MAX_DEPTH} levels")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, skipkeys=True, default=str)
            size = len(column.encode() + text.encode(errors="strict" if column in ENCODED else "replace"))
        except ValueError as error:
            half = "holds half a surrogate pair; allowed is text that UTF-8 can encode"
            told = half if isinstance(error, UnicodeEncodeError) else "holds NaN or infinity; leave the field out"
            raise _error(path, number, column, told) from error
        if size > COLUMN_BYTES:
            raise _error(path, number, column, f"is too large; allowed are {COLUMN_BYTES} bytes in all")


def _error(path: Path, number: int, column: str, problem: str) -> UserError:
    return UserError(f"{row_place(path, number)}, column {column}: {problem}")
