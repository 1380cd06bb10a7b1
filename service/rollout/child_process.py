"""Child processes that answer requests, one at a time. If a process hangs, crashes or writes endless output, only one
request fails.

    parent --JSON line--> keeper and process (service.rollout.child_main) --JSON line--> parent

A process is reused for later requests. It is killed, with all processes that it started, when the parent ends, or when
its caller stops waiting for an answer (deadline, cancelled task).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from service.environment_variables import SAFE_PATH, USER_FOLDER
from service.rollout.child_main import KILL_SECONDS, SIGNALLED
from service.rollout.environment import OversizedOutput
from service.user_code import user_folder

STARTED_SECONDS = 20.0
"""Seconds in which a keeper must have started; only a started keeper can end processes."""


class ChildDied(Exception):
    """Raised if a child process ended before it answered, or answered out of order."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        """The process's exit code, or minus the signal that ended it; None: it answered out of order."""


class ChildRaised(Exception):
    """Raised if code in a child process raised an error. The message is the text of that error."""


class ChildProcesses:
    """A pool of child processes. Each runs the function `main` of the module `module`; an idle process is used again.
    `limit`: maximum bytes of an answer."""

    def __init__(self, module: str, limit: int) -> None:
        self._module = module
        self._limit = limit
        self._idle: list[ChildProcess] = []
        self._all: set[ChildProcess] = set()
        self._closed = False

    async def take(self) -> ChildProcess:
        """An idle process, or a new one."""
        self._all = {child for child in self._all if not child.has_ended}
        while self._idle:
            child = self._idle.pop()
            if child.usable:
                return child
            child.kill()
        child = await ChildProcess.start(self._module, self._limit)
        self._all.add(child)
        if self._closed:
            child.kill()
        return child

    def give_back(self, child: ChildProcess) -> None:
        """Return a process to the pool if it is still usable."""
        if child.usable:
            self._idle.append(child)

    async def close(self) -> None:
        """End all processes, including processes that are just starting."""
        self._closed = True
        for child in self._all:
            child.kill()
        await asyncio.gather(*(child.ended() for child in self._all))
        self._all.clear()
        self._idle.clear()


class ChildProcess:
    """A child process that answers requests."""

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.SubprocessTransport, limit: int) -> None:
        self._process = process
        self._transport = transport
        self._limit = limit
        self._broken = False
        self._requests = 0

    @staticmethod
    async def start(module: str, limit: int) -> ChildProcess:
        """Start a child process, with this process's import path. `limit`: maximum bytes of an answer."""
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit, loop),
            sys.executable,
            "-P",  # put the current folder on the import path only if this process has it
            "-m",
            "service.rollout.child_main",
            module,
            stderr=None,
            env=_environment(),
            start_new_session=True,
        )
        return ChildProcess(asyncio.subprocess.Process(transport, protocol, loop), transport, limit)

    @property
    def usable(self) -> bool:
        """True if the process can take another request."""
        return not self._broken and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """True if the process has ended and was reaped."""
        return self._process.returncode is not None

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the answer. If no valid answer comes, or this call is cancelled, the process is
        killed.

        Raises:
            ChildRaised: the process raised an error while it handled the request.
            ChildDied: the process ended, or answered out of order.
            OversizedOutput: the answer is too large.
        """
        self._requests += 1
        try:
            answer = await self._answer(json.dumps({**request, "number": self._requests}).encode() + b"\n")
            if answer["number"] != self._requests:
                raise ChildDied("its process answered an earlier request a second time")
        except BaseException:  # also if cancelled: else its late answer would be read as the next one
            self.kill()
            raise
        if "raised" in answer:
            raise ChildRaised(answer["raised"])
        return answer["returned"]

    async def _answer(self, request: bytes) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        line = b""
        try:
            self._process.stdin.write(request)
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ValueError as error:  # StreamReader.readline raises this for a line beyond its limit
            raise OversizedOutput(f"more than {self._limit} bytes at once") from error
        except (BrokenPipeError, ConnectionResetError):
            pass  # the process has ended: report its exit code below
        if not line.endswith(b"\n"):
            code = await self._process.wait()
            code = SIGNALLED - code if code > SIGNALLED else code
            raise ChildDied(f"its process ended with code {code}", code)
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process and all its descendants."""
        self._broken = True
        with suppress(ProcessLookupError):  # the process has ended
            self._process.terminate()  # the keeper kills all descendants
        # asyncio stops reading an endless output, so it would never see the end of the pipe that `Process.wait` waits
        # for.
        if (answers := self._transport.get_pipe_transport(1)) is not None:
            answers.close()

    async def ended(self) -> None:
        """Wait until the process and its descendants have ended. Stop waiting after a time limit, because some
        processes cannot be killed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS + STARTED_SECONDS):
                await self._process.wait()


def _environment() -> dict[str, str]:
    """The environment variables of a child process: this process's import path and user folder. `SAFE_PATH` is left
    out, so that Python programs that the child starts have their usual import path."""
    kept = {name: value for name, value in os.environ.items() if name != SAFE_PATH}
    return {**kept, USER_FOLDER: str(user_folder()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
