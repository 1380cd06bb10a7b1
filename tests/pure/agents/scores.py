"""Scoring functions of tests."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from service.rollout.environment import Task


def answered(task: Task, folder: Path, transcript: str) -> float:
    """1 where the file `answer` holds the row's answer."""
    return float((folder / "answer").read_text().strip() == task.reward_spec["ground_truth"])


def length(task: Task, folder: Path, transcript: str) -> float:
    """The characters of the transcript."""
    return len(transcript)


def nan(task: Task, folder: Path, transcript: str) -> float:
    """No number."""
    return float("nan")


def never_ends(task: Task, folder: Path, transcript: str) -> float:
    """Return never, whatever is raised in it."""
    while True:
        with suppress(BaseException):
            time.sleep(600)
