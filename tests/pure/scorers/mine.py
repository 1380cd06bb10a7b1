"""Scorers of a user: good ones and bad ones."""

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any

from service.scorers.user import Trajectory


def lengths(trajectories: Sequence[Trajectory]) -> tuple[list[float], list[Any]]:
    """A reward for each character of a response, and why."""
    return [len(t.turns[-1].response) / 8 for t in trajectories], [{"uid": t.uid} for t in trajectories]


class Weighed:
    """Rewards every trajectory alike."""

    def __init__(self, weight: float = 1.0) -> None:
        self._weight = weight

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """The same for all."""
        return [self._weight + trajectory.task["extra_info"].get("bonus", 0) for trajectory in trajectories]


class Teacher:
    """The log-probability of a token is minus an eighth of the tokens before it."""

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """One of each token."""
        return [-place / 8 for place in range(len(token_ids))]


def raises(trajectories: Sequence[Trajectory]) -> list[float]:
    """Raises."""
    raise RuntimeError("no \x1b[2J mood")


def leaves(trajectories: Sequence[Trajectory]) -> list[float]:
    """Ends the interpreter, it believes."""
    raise SystemExit(3)


def cancels(trajectories: Sequence[Trajectory]) -> list[float]:
    """Raises what an event loop of its own raised."""
    raise asyncio.CancelledError("late")


class Unready:
    """Ends the interpreter, it believes, before it is made."""

    def __init__(self) -> None:
        raise SystemExit("no licence")

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Never called."""
        return []


def dies(trajectories: Sequence[Trajectory]) -> list[float]:
    """Ends its process."""
    os._exit(3)


def hangs_for_long(trajectories: Sequence[Trajectory]) -> list[float]:
    """Takes far longer than it has, in each process."""
    time.sleep(600)
    return [0.0] * len(trajectories)
