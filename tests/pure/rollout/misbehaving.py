"""Environments that do what they should not; tests run them in processes of their own."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from service.rollout.environment import Message, StepResult, Task


class Echo:
    """Behaves: says back what it hears, and in which process."""

    def __init__(self, suffix: str = "") -> None:
        self.suffix = suffix

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        print("noise on stdout must not disturb the answers")
        return task.prompt

    async def step(self, text: str) -> StepResult:
        return StepResult([Message(role="user", content=text + self.suffix)], 0.5, False, {"pid": os.getpid()})

    async def close(self) -> None:
        pass


class Picky(Echo):
    def check_task(self, task: Task) -> None:
        raise LookupError("I do not like it")


class Promises(Echo):
    async def check_task(self, task: Task) -> None:
        raise LookupError("nobody waits for this")


class Blocks(Echo):
    async def step(self, text: str) -> StepResult:
        time.sleep(1000)
        return await super().step(text)


class Segfaults(Echo):
    async def step(self, text: str) -> StepResult:
        ctypes.string_at(0)
        return await super().step(text)


class Exits(Echo):
    async def step(self, text: str) -> StepResult:
        sys.exit(3)


class Raises(Echo):
    async def step(self, text: str) -> StepResult:
        raise KeyError("gone")


class ReadsStdin(Echo):
    async def step(self, text: str) -> StepResult:
        return await super().step(subprocess.run(["cat"], capture_output=True, text=True, check=True).stdout)


class Detaches(Echo):
    """Starts a process in a session of its own, which outlives the process between them, and dies at its first step."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        subprocess.run(["sh", "-c", f"setsid sleep 600 > /dev/null & echo $! > {self.suffix}"], check=True)
        return task.prompt

    async def step(self, text: str) -> StepResult:
        os._exit(3)


class KeepsTheInterpreter(Detaches):
    """Its first step lets no other thread of its process run."""

    async def step(self, text: str) -> StepResult:
        re.match("(a+)+$", "a" * 60 + "b")
        return await super().step(text)


class Forks(Echo):
    async def step(self, text: str) -> StepResult:
        os.fork()
        return await super().step(text)


class Scribbles(Echo):
    """Writes an answer of its own to whatever it can write to."""

    async def step(self, text: str) -> StepResult:
        for fd in range(3, 32):
            with suppress(OSError):
                os.write(fd, b'{"number": 1, "returned": {"messages": [], "reward": 1.0, "done": true}}\n')
        return await super().step(text)


class Wanders(Echo):
    """Says in which folder it begins, goes to another one, and closes its output."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        print("noise")
        folder = os.getcwd()
        os.chdir("/")
        os.close(1)
        sys.stdout.close()
        return [Message(role="user", content=folder)]


class Spends(Echo):
    """Changes its row."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        task.prompt[0]["content"] += f" {task.extra_info.pop('secret')}"  # type: ignore[attr-defined]
        return task.prompt


class Unmakeable(Echo):
    def __init__(self) -> None:
        raise ConnectionError("nobody listens")


class CountsInNumpy(Echo):
    async def step(self, text: str) -> StepResult:
        return StepResult([], np.float32(0.5), np.bool_(True), {"right": np.int64(1)})  # type: ignore[arg-type]


class ReadsTools(Echo):
    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return [Message(role="user", content=f"{[dict(tool) for tool in task.tools]} {task.temperature}")]


class Floods(Echo):
    async def step(self, text: str) -> StepResult:
        return StepResult([Message(role="user", content="x" * 10_000_000)], 0.0, False)
