"""A corpus: passages in a JSONL file with `id` and `contents` in each row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from service.errors import UserError
from service.rollout.environment import is_text

MALFORMED = (ValueError, KeyError, TypeError, RecursionError)
"""The errors of a row that is no passage."""
SAMPLES = 8
SAMPLE_ROWS = 250


class Passage(NamedTuple):
    """One document of a corpus."""

    id: str
    contents: str


def load_corpus(path: Path) -> list[Passage]:
    """All passages of a file.

    Raises:
        UserError: the file is missing, empty or malformed; the message names file and row.
    """
    if not path.is_file():
        raise UserError(f"corpus: there is no file {path}")
    passages: list[Passage] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                passages.append(_passage(line))
    except UnicodeDecodeError as error:
        raise UserError(f"corpus: {path}, row {len(passages)} or one soon after it: not UTF-8: {error}") from error
    except MALFORMED as error:
        place = f"corpus: {path}, row {len(passages)}"
        raise UserError(f"{place}: give an object with id and contents ({error})") from error
    if not passages:
        raise UserError(f"corpus: {path} has no rows")
    return passages


def sample(path: Path) -> Iterator[tuple[int, Passage]]:
    """(bytes of the row, passage) of rows from several parts of a file; malformed rows are left out."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for part in range(SAMPLES):
            if (begin := size * part // SAMPLES) > file.tell():
                file.seek(begin)
                file.readline()  # the rest of a row
            for _ in range(SAMPLE_ROWS):
                line = file.readline()
                try:
                    yield len(line), _passage(line)
                except MALFORMED:
                    continue


def _passage(line: str | bytes) -> Passage:
    document = json.loads(line)
    if not is_text(document["contents"]):
        raise TypeError("contents is no text")
    return Passage(str(document["id"]), document["contents"])
