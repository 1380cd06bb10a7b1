"""Reads rows from JSONL and parquet, and writes JSONL.

A data set is a file, a folder of files, or a pattern of names such as `gsm8k/main/train-*.parquet`. The rows of several
files follow each other in the order of the files' names. A folder that holds several splits or subsets is refused, and
of a folder of Harbor's tasks each task is a row.

A field that is null is left out, at every depth, because parquet gives each object the fields of all objects of its
column. An object in a text is not changed.

    rows             {"x": 1}, {"y": 2}
    in parquet       {"x": 1, "y": null}, {"x": null, "y": 2}
    as read          {"x": 1}, {"y": 2}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from service.errors import UserError
from service.files import atomic_file, matching
from service.rollout.environment import is_text

FORMS = (".jsonl", ".parquet")
UNREAD = (".arrow", ".bz2", ".csv", ".gz", ".tsv", ".xz", ".zip", ".zst")
"""Endings of files that may hold rows in another form."""
SPLIT = re.compile(r"^(train|test|validation|valid|val|dev|eval)(?=[-_.])")
"""The beginning of a file's name that says of which split it is."""
BATCH_ROWS = 256
"""Rows that are expanded at once: parquet may store a long text once for all rows."""
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from)["']\s*:""")
"""The beginning of a text that is meant as a list of messages."""


def read_rows(path: Path) -> list[Any]:
    """The rows of a data set, without checks of their content.

    Raises:
        UserError: a file does not exist, or cannot be read; or a folder holds more than one split or subset.
    """
    return [row for file in _files_of(path) for row in _read(file)]


def is_joined(path: Path) -> bool:
    """True if a data set consists of several files, or is the only file of a folder."""
    files = _files_of(path)
    return files != [path] and not files[0].is_dir()


def row_place(path: Path, number: int) -> str:
    """The place of a data set's row in a message: its file, and its number there. Reads several files once more."""
    files = _files_of(path)
    for file in files[:-1]:
        if number < (n_rows := len(_read(file))):
            return f"dataset {file}, row {number}"
        number -= n_rows
    return f"dataset {files[-1]}, row {number}"


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return matching(path) or [path]
    if tasks := sorted(file.parent for file in path.glob("*/task.toml")):
        return tasks
    inside = sorted(file for file in path.rglob("*") if "/." not in str(file).removeprefix(str(path)))
    if packed := [file for file in inside if file.suffix in UNREAD]:
        raise UserError(f"dataset {path}: {packed[0]} would not be read; give .jsonl or .parquet files")
    found = [file for file in inside if file.suffix in FORMS]
    sets = {(file.parent, *SPLIT.findall(file.name)[:1]) for file in found}
    if len(sets) != 1:
        names = " or ".join(sorted(str(Path(folder, "".join([*split, "*"]))) for folder, *split in sets))
        has = f"several sets; give {names}" if sets else "no .jsonl or .parquet files"
        raise UserError(f"dataset {path}: the folder has {has}")
    return found


def _read(file: Path) -> list[Any]:
    if (file / "task.toml").exists():
        return [_task_row(file.resolve())]
    if not file.is_file():
        raise UserError(f"dataset {file}: {'it is no plain file' if file.exists() else 'there is no such file'}")
    if (read := {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(file.suffix)) is None:
        raise UserError(f"dataset {file}: it ends in {file.suffix!r}; give a .jsonl or a .parquet file")
    return read(file)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSONL; an existing file is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            try:
                line = json.dumps(row, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:  # another type, a cycle, or too deep
                raise UserError(f"dataset {path}, row {number}: a value cannot be written as JSON: {error}") from error
            # Half a surrogate pair cannot be encoded as UTF-8, but JSON can escape it.
            file.write(f"{line if is_text(line) else json.dumps(row)}\n")


def messages_of(value: Any) -> Any:
    """The messages that a text gives as JSON, without fields that are null; any other value unchanged.

    Raises:
        ValueError: the text begins like messages, but is no JSON.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        if MESSAGES.match(value):
            raise
        return value
    given = read if isinstance(read, list) else [read]
    are_messages = given and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in given)
    return [_without_nulls(one.items()) for one in given] if are_messages else value


def _task_row(folder: Path) -> dict[str, Any]:
    said = folder / "instruction.md"  # a task in several steps has none
    return {"uid": folder.name, "prompt": _text(said) if said.exists() else folder.name, "task_folder": str(folder)}


def _read_parquet(path: Path) -> list[Any]:
    rows: list[Any] = []
    known: dict[str, str] = {}
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                rows += _values(batch.to_struct_array(), known)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        # pyarrow's errors differ between broken bytes and values out of Python's range, such as the year 300000.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"dataset {path}: no parquet file that can be read: {reason}") from error
    return rows


def _values(array: pa.Array, known: dict[str, str]) -> list[Any]:
    """The values of an Arrow array; structs lack null fields, and equal texts are one object, which `known` holds."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        if len(array) < len(array.dictionary):
            return _values(array.dictionary_decode(), known)
        named = _values(array.dictionary, known)
        return [None if index is None else named[index] for index in array.indices.to_pylist()]
    if pa.types.is_struct(kind):
        names, columns = [field.name for field in kind], [_values(column, known) for column in array.flatten()]
        rows = zip(*columns, strict=True) if columns else [()] * len(array)
        return [
            {name: value for name, value in zip(names, row, strict=True) if value is not None} if is_valid else None
            for is_valid, row in zip(array.is_valid().to_pylist(), rows, strict=True)
        ]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner, lengths = iter(_values(array.flatten(), known)), pc.list_value_length(array).to_pylist()
        return [None if length is None else list(islice(inner, length)) for length in lengths]
    values: list[Any] = array.to_pylist(maps_as_pydicts="strict")
    return [known.setdefault(value, value) if type(value) is str else value for value in values]


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line, object_pairs_hook=_without_nulls))
        except (ValueError, RecursionError) as error:
            place, what = f"line {number}", str(error)
            if isinstance(error, json.JSONDecodeError):
                place, what = f"{place}, column {error.colno}", error.msg
            raise UserError(f"dataset {path}, row {len(rows)}: no JSON: {what} ({place})") from error
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise UserError(f"dataset {path}: not UTF-8: {error}") from error
    except OSError as error:
        raise UserError(f"dataset {path}: cannot be read: {error.strerror}") from error


def _without_nulls(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None}
