"""Environments that count their turns; with little to import, because child processes import them too."""

from __future__ import annotations

from collections.abc import Sequence

from service.rollout.environment import Message, StepResult, Task

TURNS = 4


class Counts:
    """Answers with the number of the turn; ends after `TURNS`."""

    def __init__(self) -> None:
        self.turns = 0
        self.heard: list[str] = []

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return task.prompt

    async def step(self, text: str) -> StepResult:
        self.turns += 1
        self.heard.append(text)
        told = (Message(role="user", content=f"{self.turns}"),)
        return StepResult(told, float(self.turns), self.turns == TURNS, {"turns": 1.0})

    async def close(self) -> None:
        pass


class Restorable(Counts):
    async def snapshot(self) -> bytes:
        return bytes([self.turns])

    async def restore(self, snapshot: bytes) -> None:
        (self.turns,) = snapshot


class Replayable(Counts):
    replayable = True


class Forgetful(Replayable):
    """Its second instance answers otherwise."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).instances += 1
        self.turns = 5 * (type(self).instances - 1)


class Long(Restorable):
    async def snapshot(self) -> bytes:
        return bytes(4096)
