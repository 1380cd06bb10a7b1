"""Check files before they are committed: `python -m scripts.check_files FILE ...`; exit code 1 where one is wrong.

Refused: a file of more than 512 KiB, marks of a merge conflict, and YAML, TOML or JSON that cannot be read.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 512 << 10

CONFLICT_MARKS = (b"<<<<<<< ", b">>>>>>> ")
"""How the first and the last line of a conflict begin; the line of `=` between them also underlines headings."""

READERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": lambda text: list(yaml.safe_load_all(text)),
    ".yml": lambda text: list(yaml.safe_load_all(text)),
}


def problems(path: Path) -> Iterator[str]:
    """A line for each problem of a file."""
    content = path.read_bytes()
    if len(content) > MAX_BYTES:
        yield f"{path}: {len(content)} bytes, at most {MAX_BYTES} are committed"
    for number, line in enumerate(content.splitlines(), 1):
        if line.startswith(CONFLICT_MARKS):
            yield f"{path}:{number}: a mark of a merge conflict"
    reader = READERS.get(path.suffix)
    if reader is not None:
        try:
            reader(content.decode())
        except (ValueError, yaml.YAMLError) as error:
            yield f"{path}: cannot be read as {path.suffix[1:]}: {' '.join(str(error).split())}"


def main(names: list[str]) -> int:
    """Print the problems of the named files; returns the exit code."""
    found = [problem for name in names for problem in problems(Path(name))]
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
