"""Generators without Ray, whose methods are called as an actor's are, and which can be told to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import ray.exceptions

from service.types import PolicyVersion


class Method:
    """Something with `remote`, as an actor's method has it."""

    def __init__(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class FakeGenerator:
    """Writes down what it was asked; what `failing` names raises that, once."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self.said = said
        self.failing: dict[str, BaseException] = {}
        self.written = 0
        self.paths: set[str] = set()
        self.gate = asyncio.Event()
        """Closed, a file is being written."""
        self.gate.set()
        self.loading = asyncio.Event()
        """Closed, an update is being made."""
        self.loading.set()
        self.hold_weights = Method(self._hold)
        self.release_weights = Method(self._release)
        self.update_weights = Method(self._update)
        self.join_trainer = Method(self._join)

    def dies(self) -> None:
        """Its files go with it."""
        self.paths.clear()

    async def _hold(self, data: Any, checksum: int) -> str:
        await self.gate.wait()
        self._fail("hold")
        self.written += 1
        path = f"/{self.name}/{self.written}"
        self.paths.add(path)
        return path

    async def _release(self, path: str) -> None:
        self._fail("release")
        self.paths.remove(path)

    async def _update(self, version: int, data: Any, checksum: int) -> None:
        await self.loading.wait()
        self._fail("update")
        self.said.append(f"{self.name} takes {PolicyVersion.unpack(version)} from {data}, checksum {checksum}")

    async def _join(self, meeting: Any, first_rank: int) -> None:
        self._fail("join")
        self.said.append(f"{self.name} joins at {first_rank}")

    def _fail(self, what: str) -> None:
        if what in self.failing:
            raise self.failing.pop(what)


def died() -> BaseException:
    return ray.exceptions.RayActorError()
