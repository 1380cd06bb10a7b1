"""Ten tasks of one command in Harbor's format, with words and demonstrations for a small model
(configs/harbor_tiny.yaml).

    user: folder red                     assistant: mkdir red         reward 1
    user: file blue                      assistant: mkdir red         reward 0

python -m baton.examples.harbor_tiny FOLDER IMAGE       write the tasks; the image has bash, mkdir, touch and tar
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from baton import Message
from baton.harbor import Trial as Trial

COMMANDS = {"file": ("touch", "-f"), "folder": ("mkdir", "-d")}
"""For each kind of thing: the command that makes it, and the shell's test."""
NAMES = ("red", "blue", "green", "black", "white")
TASKS = [(kind, name) for kind in COMMANDS for name in NAMES]
TOML = """schema_version = "1.4"
[environment]
docker_image = "{image}"
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 120.0
"""


def make_tasks(folder: Path, image: str) -> None:
    """Write the folder of each task."""
    for kind, name in TASKS:
        test = f"[ {COMMANDS[kind][1]} {name} ]"
        files = {
            "task.toml": TOML.format(image=image),
            "instruction.md": f"{kind} {name}\n",
            "tests/test.sh": f"if {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        }
        for path, text in files.items():
            (file := folder / f"{kind}-{name}" / path).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def vocabulary() -> tuple[str, ...]:
    """Every word of the tasks and their commands."""
    return (*COMMANDS, *(command for command, _ in COMMANDS.values()), *NAMES)


def demonstrations(n: int, right_fraction: float, rng: np.random.Generator) -> list[list[Message]]:
    """`n` tasks with one command each. About `right_fraction` of the commands are right; the others are commands of
    random tasks."""
    shown = []
    for _ in range(n):
        kind, name = TASKS[rng.integers(len(TASKS))]
        does, what = (kind, name) if rng.random() < right_fraction else TASKS[rng.integers(len(TASKS))]
        reply = f"{COMMANDS[does][0]} {what}"
        shown.append([Message(role="user", content=f"{kind} {name}"), Message(role="assistant", content=reply)])
    return shown


if __name__ == "__main__":
    make_tasks(Path(sys.argv[1]), sys.argv[2])
