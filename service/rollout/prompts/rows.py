"""Reads rows from JSONL and parquet, and writes JSONL.

A data set is a file, a folder of files, or a pattern of names such as `gsm8k/main/train-*.parquet`. Several files are
read in the order of their names. A folder that holds several splits or subsets is refused. In a folder of Harbor tasks,
each task is a row.

A field that is null is left out, at every depth: in parquet, each object has the fields of all objects of its column.
An object in a text is not changed.

    rows             {"x": 1}, {"y": 2}
    in parquet       {"x": 1, "y": null}, {"x": null, "y": 2}
    as read          {"x": 1}, {"y": 2}
"""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from service.errors import UserError
from service.files import atomic_file, free_memory, matching
from service.rollout.environment import is_text, refuse_other_role
from service.rollout.exact_json import check_calls, exact_json, without_nulls

log = logging.getLogger(__name__)

FORMS = (".jsonl", ".parquet")
SPLIT = re.compile(r"^(?:.*?[-_.])?(train|test|validation|valid|val|dev|eval)(?=[-_.])")
"""The beginning of a file's name, up to the split that it names."""
ENDINGS = "arrow|avro|bz2|csv|feather|gz|jsonl|lz4|ndjson|orc|parquet|pq|tsv|xz|zip|zst"
UNREAD = re.compile(rf".*\.({ENDINGS})|{SPLIT.pattern}.*\.json", re.IGNORECASE)
"""Names of files that may hold rows, but cannot be read unless their ending is one of `FORMS`."""
BATCH_ROWS = 256
"""Number of rows that are expanded at once. (Parquet may store a long text once for all rows.)"""
LONG_ROW_BYTES = 1 << 11
"""From this number of bytes per row on, equal texts of rows share one object."""
MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from)["']\s*:""")
"""The beginning of a text that is meant as a list of messages."""
TWICE = re.compile(r"""\s*"\s*\[?\s*\{\s*\\"(?:role|content|from)\\"\s*:""")
"""The beginning of messages that were written as JSON twice."""
SLOW_BYTES = 8 << 30
"""From this number of characters on, a line says that reading a file takes minutes. (Its own size may be small.)"""
TASK_BYTES = 800
"""Bytes of memory that reading one row takes if it has a short prompt and no other columns."""
NO_ROOM = "need more memory than is free; give fewer rows, or a machine with more memory"


@contextmanager
def without_gc() -> Iterator[None]:
    """Switch off garbage collection within the block: code that makes many lasting objects is then twice as fast.
    Raises a `UserError` if the memory is exhausted."""
    gc.disable()
    try:
        yield
    except MemoryError as error:
        raise UserError(f"data: the rows of all datasets {NO_ROOM}") from error
    finally:
        gc.enable()


@without_gc()
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
    """A row's place, for messages: its file, and its number in this file. Reads several files again to find it."""
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
    if unread := [file for file in inside if file.suffix not in FORMS and UNREAD.fullmatch(file.name)]:
        raise UserError(f"dataset {path}: {unread[0]} would not be read; give .jsonl or .parquet files")
    found = [file for file in inside if file.suffix in FORMS]
    sets = {(file.parent, *SPLIT.findall(file.name.lower())[:1]) for file in found}
    if len(sets) != 1:
        names = " or ".join(sorted(str(Path(folder, "*".join(["", *split, ""]))) for folder, *split in sets))
        has = f"several sets; give {names}" if sets else "no .jsonl or .parquet files"
        raise UserError(f"dataset {path}: the folder has {has}")
    return found


def _read(file: Path) -> list[Any]:
    if (file / "task.toml").exists():
        folder, said = file.resolve(), file / "instruction.md"  # missing if a task has several steps
        prompt = _text(said) if said.exists() else folder.name
        return [{"uid": folder.name, "prompt": prompt, "task_folder": str(folder)}]
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
                line = json.dumps(row, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:  # another type, a cycle, or too deep
                raise UserError(f"dataset {path}, row {number}: a value cannot be written as JSON: {error}") from error
            # Half a surrogate pair cannot be encoded as UTF-8, but JSON can escape it.
            file.write(f"{line if is_text(line) else json.dumps(row)}\n")


def messages_of(value: Any) -> Any:
    """The messages in a JSON text, without fields that are null; any other value is returned unchanged. A message that
    calls tools may have no content.

    Raises:
        ValueError: the text begins like messages, but is no JSON; was written twice; a role has another name; or a
            value in JSON would be changed.
    """
    if isinstance(value, str) and TWICE.match(value):
        raise ValueError("is a text in JSON of a text in JSON; write the messages themselves, or their JSON once")
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            if MESSAGES.match(value):
                raise
            return value
        given = read if isinstance(read, list) else [read]
        if not given or not all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in given):
            return value
        exact_json(value)  # refuses a value that `json` would change
        value = [{name: of for name, of in one.items() if of is not None} for one in given]
    if not isinstance(value, list):
        return value
    for one in (one for one in value if isinstance(one, dict)):
        refuse_other_role(one.get("role", one.get("from")))
        check_calls(one)
    return [{"content": "", **one} if isinstance(one, dict) and "tool_calls" in one else one for one in value]


def _read_parquet(path: Path) -> list[Any]:
    rows: list[Any] = []
    known: dict[str, str] = {}
    try:
        with pq.ParquetFile(path) as file:
            kinds, names = str(file.schema_arrow), file.schema_arrow.names
            if twice := [name for place, name in enumerate(names) if name in names[:place]]:
                raise ValueError(f"the column {twice[0]} comes twice")
            if (count := file.metadata.num_rows) * TASK_BYTES > free_memory():
                raise ValueError(f"its {count:,} rows {NO_ROOM}")
            for batch in file.iter_batches(BATCH_ROWS):
                read = batch.to_pylist(maps_as_pydicts="strict" if "map<" in kinds else None)  # dicts are slower
                if not rows and (size := len(str(read[0])) * count) > SLOW_BYTES:
                    log.warning("dataset %s: reading its %d rows, about %d GiB, takes minutes", path, count, size >> 30)
                is_long = batch.nbytes >= LONG_ROW_BYTES * len(batch)
                is_odd = is_long or "dictionary<" in kinds or "map<" in kinds or _has_nulls(batch.to_struct_array())
                rows += [without_nulls(row, known) for row in read] if is_odd else read
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        # pyarrow's errors differ between broken bytes and values out of Python's range, such as the year 300000.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"dataset {path}: no parquet file that can be read: {reason}") from error
    return rows


def _has_nulls(array: pa.Array) -> bool:
    kind = array.type
    inner = array.flatten() if pa.types.is_struct(kind) else [array.flatten()] if pa.types.is_nested(kind) else []
    return array.null_count > 0 or any(map(_has_nulls, inner))


def _read_jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(exact_json(line, keeps_null=False))
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
