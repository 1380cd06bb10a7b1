"""Whatever an environment returns or raises, the trajectory ends with a reason and nothing of it gets further."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from service.handoff.steps.info import is_info
from service.handoff.steps.values import StopReason
from service.rollout.agent_loop import run_trajectory
from service.rollout.chat.chat import Chat
from service.rollout.env_guard import EnvGuard, LeakedTasks
from service.rollout.environment import Message, OversizedOutput, StepResult, Task
from service.rollout.step_sinks import StepColumns
from service.types import TrajectoryId
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, limits

N = 1000
"""Trajectories in a second or two on one core."""
HALF, ESCAPE = "\ud800", "\x1b[2J\x1b]0;owned\x07\u202e\r"
DUNDERS = ("__iter__", "__len__", "__getitem__", "__eq__", "__bool__", "__str__", "__repr__", "__float__", "__int__")
DUNDERS += ("__index__", "__getattribute__", "keys", "items", "get", "encode", "item")
BASES = (list, dict, str, float, int, tuple, object, Sequence, Mapping, np.float64, np.int64, StepResult)


class Unspeakable(BaseException):
    """An exception that cannot be shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt(ESCAPE)

    __repr__ = __str__


class Text(str):
    """A text whose methods return other texts of this class, or anything."""

    def __str__(self) -> Any:
        return Text("another")

    def encode(self, *of: Any) -> Any:
        return b""


ERRORS: tuple[Callable[[], BaseException], ...] = (
    *(KeyboardInterrupt, GeneratorExit, RecursionError, MemoryError, StopIteration, StopAsyncIteration, Unspeakable),
    *(asyncio.CancelledError, asyncio.TimeoutError, lambda: ValueError(ESCAPE + HALF), lambda: SystemExit(HALF)),
    *(lambda: KeyError(Text("x")), lambda: OversizedOutput(ESCAPE)),
    lambda: BaseExceptionGroup("many", [KeyboardInterrupt(), ValueError(HALF)]),
)


class HostileEnvironment:
    """An episode whose methods return hostile values and raise hostile errors; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._raise(0.02)

    def _raise(self, chance: float) -> None:
        if self._random.random() < chance:
            raise self._random.choice(ERRORS)()

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        self._raise(0.04)
        return task.prompt if self._random.random() < 0.8 else self._messages()

    async def step(self, text: str) -> StepResult:
        self._raise(0.04)
        good = [self._messages(), 0.5, self._random.random() < 0.2, {"n": 1}, None]
        odd = [self._value() if self._random.random() < 0.06 else value for value in good]
        return self._value() if self._random.random() < 0.03 else StepResult(*odd)  # type: ignore[no-any-return]

    async def close(self) -> None:
        self._raise(0.2)

    def _messages(self) -> Any:
        message: dict[Any, Any] = {"role": "user", "content": "17"}
        if self._random.random() < 0.15:
            message[self._random.choice(("role", "content", "a", HALF, 1, None, (1, 2), Text("role"), b"b"))] = (
                self._value()
            )
        return [message] if self._random.random() < 0.9 else self._value()

    def _instance(self) -> Any:
        """An instance of a new class: a built-in one's child, of which some methods raise or lie."""
        base: Any = self._random.choice(BASES)
        error = self._random.choice(ERRORS)

        def raises(*arguments: Any, **more: Any) -> Any:
            raise error()

        lies = (lambda *_: 1 << 62, lambda *_: Text("lie"), lambda *_: itertools.count(), lambda *_: NotImplemented)
        chosen = self._random.sample(DUNDERS, self._random.choice((1, 3, len(DUNDERS))))
        body: dict[str, Any] = {name: self._random.choice((raises, *lies)) for name in chosen}
        if base in (Sequence, Mapping):
            body = {"__len__": lambda _: 1 << 62, "__getitem__": lambda _, i: i, "__iter__": itertools.count} | body
        made: Any = type(base)(self._random.choice(("X", ESCAPE)), (base,), body)
        if base is StepResult:
            return tuple.__new__(made, (1,) * self._random.choice((0, 1, 5)))
        content = {list: [[1]], dict: [{"a": 1}], str: ["text"], tuple: [(1, 2)]}.get(base, [])
        return base.__new__(made, *content) if base in (str, tuple, float, int) else made(*content)

    def _value(self, depth: int = 3) -> Any:
        """Any value, good ones too."""
        kind = self._random.randrange(6 if depth else 4)
        if kind == 0:
            return self._instance()
        if kind == 1:
            deep: Any = "deep"
            for _ in range(self._random.choice((10, 100, 5000))):
                deep = self._random.choice(([deep], {"x": deep}))
            return deep
        if kind < 4:
            cyclic: list[Any] = []
            cyclic.append({"again": cyclic})
            plain = (0, True, None, 0.5, "look fox", "17", np.float32(0.5), np.bool_(True), np.int8(3), cyclic)
            huge = (10**400, -(10**5000), math.nan, -math.inf, np.longdouble("1e4000"), np.clongdouble(1j), 1 << 70)
            other = (b"bytes", {1}, range(1 << 60), 1j, np.ones(3), np.datetime64("2020"), iter([]), print, self)
            return self._random.choice((*plain, *huge, HALF, ESCAPE, "x" * 5000, Text("text"), *other))
        values = [self._value(depth - 1) for _ in range(self._random.randrange(4))]
        return values if kind == 4 else dict(enumerate(values)) | {"role": values}


async def test_hostile_values_and_exceptions_cost_their_own_trajectories_only(chat: Chat) -> None:
    engine, leaked, reasons = ScriptedEngine(chat, lambda words: "look fox age"), LeakedTasks(), Counter[str]()
    allowed = limits(chat, max_observation_characters=4000)
    async with asyncio.timeout(500):
        for seed in range(N):
            guard = EnvGuard("hostile", lambda seed=seed: HostileEnvironment(seed), allowed, leaked)  # type: ignore[misc]
            columns = StepColumns()
            played = await run_trajectory(TrajectoryId(seed, 0), QUESTION, guard, engine, chat, allowed, 0, columns)
            reasons[StopReason(played.end.stop_reason)] += 1
            assert type(played.end.reward) is float
            assert is_info(played.end.info)
            json.dumps([played.end.info, played.failure], ensure_ascii=False).encode()
            assert played.failure.isprintable()
    assert len(leaked) == 0
    wanted = {"environment_error", "environment_output", "environment_reward", "stop", "max_turns"}
    assert wanted <= set(reasons), "the draws reach every way to end"
