"""Values and exceptions as a hostile environment would make them, drawn from a seeded generator."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from service.rollout.environment import Message, OversizedOutput, StepResult, Task

HALF = "\ud800"
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e\r"
DUNDERS = (
    *("__iter__", "__len__", "__getitem__", "__contains__", "__eq__", "__ne__", "__lt__", "__bool__", "__call__"),
    *("__str__", "__repr__", "__format__", "__float__", "__int__", "__index__", "__abs__", "__round__", "__trunc__"),
    *("__reversed__", "__add__", "__mul__", "__getattribute__", "__dir__", "__sizeof__", "__reduce_ex__", "__copy__"),
    *("__deepcopy__", "__await__", "__missing__", "keys", "items", "values", "get", "encode", "item"),
)
BASES = (list, dict, str, float, int, tuple, object, Sequence, Mapping, np.float64, np.int64, np.float32, StepResult)


class Unspeakable(BaseException):
    """An exception whose every attribute raises another one."""

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
    lambda: ValueError(ESCAPE + HALF),
    lambda: KeyError(Text("x")),
    KeyboardInterrupt,
    lambda: SystemExit(HALF),
    GeneratorExit,
    RecursionError,
    MemoryError,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
    asyncio.TimeoutError,
    lambda: OversizedOutput(ESCAPE),
    Unspeakable,
    lambda: BaseExceptionGroup("many", [KeyboardInterrupt(), ValueError(HALF)]),
)


class Hostile:
    """Draws values; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def error(self) -> BaseException:
        return self.random.choice(ERRORS)()

    def raiser(self) -> Callable[..., Any]:
        make = self.random.choice(ERRORS)

        def raises(*arguments: Any, **more: Any) -> Any:
            raise make()

        return raises

    def instance(self) -> Any:
        """An instance of a new class: a built-in one's child, of which some methods raise or lie."""
        base: Any = self.random.choice(BASES)
        chosen = self.random.sample(DUNDERS, self.random.choice((1, 3, len(DUNDERS))))
        body: dict[str, Any] = {name: self.random.choice((self.raiser(), *self.lies())) for name in chosen}
        if base in (Sequence, Mapping):
            body = {"__len__": lambda _: 1 << 62, "__getitem__": lambda _, i: i, "__iter__": itertools.count} | body
        metaclass: Any = type(base)
        made = metaclass(self.random.choice(("X", ESCAPE)), (base,), body)
        content = {list: [[1]], dict: [{"a": 1}], str: ["text"], tuple: [(1, 2)]}.get(base, [])
        if base is StepResult:
            return tuple.__new__(made, (1,) * self.random.choice((0, 1, 5)))
        return base.__new__(made, *content) if base in (str, tuple, float, int) else made(*content)

    def lies(self) -> tuple[Callable[..., Any], ...]:
        return (
            lambda *_: -1,
            lambda *_: 1 << 62,
            lambda *_: Text("lie"),
            lambda *_: itertools.count(),
            lambda *_: iter([(1, 2, 3)]),
            lambda *_: NotImplemented,
            lambda *_: self.value(1),
        )

    def value(self, depth: int = 4) -> Any:
        """Any value, good ones too."""
        draw = self.random.choice
        kind = self.random.randrange(12 if depth else 8)
        if kind < 2:
            return draw((0, 1, True, None, 0.5, "look fox", "17", "", np.float32(0.5), np.bool_(True), np.int8(3)))
        if kind == 2:
            huge = (10**400, -(10**5000), math.nan, -math.inf, np.longdouble("1e4000"), np.clongdouble(1j), 1 << 70)
            return draw((*huge, HALF, ESCAPE, "x" * 5000, Text("text"), b"bytes", {1}, range(1 << 60), 1j))
        if kind == 3:
            return draw((np.ones(3), np.array(1.0), np.datetime64("2020"), (i for i in [1]), iter([]), print, self))
        if kind == 4:
            return self.cyclic()
        if kind == 5:
            deep: Any = "deep"
            for _ in range(draw((10, 100, 5000))):
                deep = draw(([deep], {"x": deep}))
            return deep
        if kind < 8:
            return self.instance()
        if kind < 10:
            return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        return {self.name(): self.value(depth - 1) for _ in range(self.random.randrange(4))}

    def cyclic(self) -> Any:
        around: Any = []
        around.append({"again": around})
        return around

    def name(self) -> Any:
        return self.random.choice(("role", "content", "a", HALF, ESCAPE, 1, None, 0.5, (1, 2), Text("role"), b"b"))

    def messages(self) -> Any:
        if self.random.random() < 0.08:
            return self.value()
        message: dict[Any, Any] = {"role": "user", "content": "17"}
        if self.random.random() < 0.1:
            message[self.name()] = self.value()
        return [message, *([self.value()] if self.random.random() < 0.05 else [])]

    def result(self) -> Any:
        if self.random.random() < 0.03:
            return self.value()
        odd = [self.random.random() < 0.06 for _ in range(5)]
        return StepResult(
            self.value() if odd[0] else self.messages(),
            self.value() if odd[1] else 0.5,
            self.value() if odd[2] else self.random.random() < 0.2,
            self.value() if odd[3] else {"n": self.value(1) if self.random.random() < 0.1 else 1},
            self.messages() if odd[4] else None,
        )


class HostileEnvironment:
    """An episode whose methods return hostile values and raise hostile exceptions."""

    def __init__(self, seed: int) -> None:
        self._hostile = Hostile(seed)
        if self._raises(0.02):
            raise self._hostile.error()

    def _raises(self, chance: float) -> bool:
        return self._hostile.random.random() < chance

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        if self._raises(0.04):
            raise self._hostile.error()
        return task.prompt if self._raises(0.8) else self._hostile.messages()

    async def step(self, text: str) -> StepResult:
        if self._raises(0.04):
            raise self._hostile.error()
        return self._hostile.result()

    async def close(self) -> None:
        if self._raises(0.2):
            raise self._hostile.error()
