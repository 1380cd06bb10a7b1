"""Ten small tasks in Harbor's format: files, texts, git, a bug in Python and sqlite.

python -m tests.containers.tasks FOLDER [IMAGE]      the image has bash, git, python3, sqlite3 and tmux
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

BASE = "localhost/baton-tasks:1"
TOML = """schema_version = "1.4"
[verifier]
timeout_sec = 120.0
environment_mode = "shared"
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 900.0
"""
NUMBERS = "RUN for n in 1 2 3 4 5; do echo $n; done > numbers.txt"
TABLE = "RUN sqlite3 shop.db 'CREATE TABLE sales (item TEXT, price INT); INSERT INTO sales VALUES (1, 20), (2, 22)'"
REPOSITORY = "RUN git init -q && git config user.email a@b && git config user.name a && echo one > a.txt && git add . "
BUG = "RUN printf 'def total(xs):\\n    return sum(xs[1:])\\n' > bag.py"
TEST = "RUN printf 'from bag import total\\nassert total([1, 2]) == 3\\nassert total([]) == 0\\n' > test_bag.py"


class MadeTask(NamedTuple):
    """What the instruction says, how the image is prepared, what has to hold afterwards, and a solution."""

    instruction: str
    prepare: str
    check: str
    solution: str


TASKS = {
    "write-file": MadeTask("Write blue to colour.txt.", "", "grep -qx blue colour.txt", "echo blue > colour.txt"),
    "rename-file": MadeTask(
        "Rename old.txt to new.txt.",
        "RUN echo 7 > old.txt",
        "[ ! -e old.txt ] && grep -qx 7 new.txt",
        "mv old.txt new.txt",
    ),
    "remove-logs": MadeTask(
        "Remove all .log files.", "RUN touch a.log b.log c.txt", "[ -e c.txt ] && ! ls *.log", "rm -f a.log b.log"
    ),
    "sum-lines": MadeTask(
        "Write the sum of numbers.txt to sum.txt.", NUMBERS, "grep -qx 15 sum.txt", "echo 15 > sum.txt"
    ),
    "last-line": MadeTask(
        "Write the last line of numbers.txt to last.txt.",
        NUMBERS,
        "grep -qx 5 last.txt",
        "tail -n 1 numbers.txt > last.txt",
    ),
    "replace-word": MadeTask(
        "Replace red by blue in colour.txt.",
        "RUN echo red red > colour.txt",
        "grep -qx 'blue blue' colour.txt",
        "sed -i s/red/blue/g colour.txt",
    ),
    "commit": MadeTask("Commit a.txt.", REPOSITORY, "git show HEAD:a.txt | grep -qx one", "git commit -q -m one"),
    "branch": MadeTask(
        "Make a branch named next.",
        f"{REPOSITORY} && git commit -q -m one",
        "git rev-parse --verify next",
        "git branch next",
    ),
    "fix-bug": MadeTask(
        "Fix bag.py, so that python3 test_bag.py passes.",
        f"{BUG}\n{TEST}",
        "python3 test_bag.py",
        "sed -i 's/.1:.//' bag.py",
    ),
    "query": MadeTask(
        "Write the sum of price in the table sales of shop.db to sum.txt.",
        TABLE,
        "grep -qx 42 sum.txt",
        "sqlite3 shop.db 'SELECT sum(price) FROM sales' > sum.txt",
    ),
}


def make_tasks(folder: Path, image: str = BASE) -> None:
    """Write the folder of each task."""
    for name, task in TASKS.items():
        silent = f"( {task.check} ) > /dev/null"
        files = {
            "task.toml": TOML,
            "instruction.md": f"{task.instruction} The current folder is /app.\n",
            "environment/Dockerfile": f"FROM {image}\nWORKDIR /app\n{task.prepare}\n",
            "tests/test.sh": f"cd /app\nif {silent}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
            "solution/solve.sh": f"cd /app\n{task.solution}\n",
        }
        for path, text in files.items():
            (file := folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


if __name__ == "__main__":
    make_tasks(Path(sys.argv[1]), *sys.argv[2:])
