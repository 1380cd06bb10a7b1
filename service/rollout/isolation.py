"""Environments in processes of their own: a hang, crash or flood affects only its own episode.

    agent loop --JSON line--> process: reset / step / close --JSON line--> agent loop

A process serves one episode at a time and is reused for the next one. It ends when its answer is no longer waited for
(deadline, cancelled trajectory), and when the agent loop's process ends, which closes its stdin.
`python -m service.rollout.isolation` is the inside of such a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from threading import Thread
from typing import IO, Any

import numpy as np

from service.rollout.environment import Environment, Message, OversizedOutput, StepResult, Task
from service.rollout.environments.registry import Options, make_environment
from service.rollout.traceback import describe_error

BYTES_PER_CHARACTER = 6
"""Most bytes of JSON for one character of an observation (`\\u0000`)."""
ROOM = 1 << 16
"""Bytes of an answer besides its observation."""


class EnvironmentDied(Exception):
    """The environment's process ended before it answered."""


class EnvironmentRaised(Exception):
    """An error that the environment raised in its process, as text."""


class Processes:
    """The processes of one generator; idle ones are reused for the next episode."""

    def __init__(self, max_observation_characters: int, trusted_modules: Sequence[str]) -> None:
        self._limit = max_observation_characters * BYTES_PER_CHARACTER + ROOM
        self._trusted_modules = tuple(trusted_modules)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._closed = False

    def environment(self, name: str, options: Options) -> IsolatedEnvironment:
        """An environment whose episode runs in one of the processes."""
        return IsolatedEnvironment(self, {"name": name, "options": dict(options), "trusted": self._trusted_modules})

    async def take(self) -> Worker:
        """An idle process, or a new one."""
        self._all = {worker for worker in self._all if not worker.has_ended}
        while self._idle:
            worker = self._idle.pop()
            if worker.usable:
                return worker
        worker = await Worker.start(self._limit)
        self._all.add(worker)
        if self._closed:
            worker.kill()
        return worker

    def give_back(self, worker: Worker) -> None:
        """Keep a process for the next episode, if it is still usable."""
        if worker.usable:
            self._idle.append(worker)

    async def close(self) -> None:
        """End all processes, also those that are starting right now."""
        self._closed = True
        for worker in self._all:
            if not worker.has_ended:
                worker.kill()
        await asyncio.gather(*(worker.ended() for worker in self._all))
        self._all.clear()
        self._idle.clear()


class Worker:
    """One process, as the agent loop uses it."""

    def __init__(self, process: asyncio.subprocess.Process, limit: int) -> None:
        self._process = process
        self._limit = limit
        self._broken = False
        self._requests = 0

    @staticmethod
    async def start(limit: int) -> Worker:
        """Start a process with this process's import path; an answer may have at most `limit` bytes."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.rollout.isolation",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            limit=limit,
            start_new_session=True,
        )
        return Worker(process, limit)

    @property
    def usable(self) -> bool:
        """True where the process can take another request."""
        return not self._broken and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """True where the process has ended and was reaped."""
        return self._process.returncode is not None

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the answer; without an answer, or when cancelled, end the process.

        Raises:
            EnvironmentRaised: the environment raised.
            EnvironmentDied: the process ended, or answered out of order.
            OversizedOutput: the answer is too large.
        """
        self._requests += 1
        try:
            answer = await self._answer(json.dumps({**request, "number": self._requests}).encode() + b"\n")
            if answer["number"] != self._requests:
                raise EnvironmentDied("its process is out of step: it answered an earlier request again")
        except BaseException:
            self.kill()
            raise
        if "raised" in answer:
            raise EnvironmentRaised(answer["raised"])
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
            pass  # the process has ended; its exit code below says more
        if not line.endswith(b"\n"):
            raise EnvironmentDied(f"its process ended with code {await self._process.wait()}")
        return json.loads(line)

    def kill(self) -> None:
        """End the process and its child processes, which may outlive the process."""
        self._broken = True
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()


class IsolatedEnvironment:
    """An environment whose episode runs in another process."""

    def __init__(self, processes: Processes, make: Mapping[str, Any]) -> None:
        self._processes = processes
        self._make = make
        self._worker: Worker | None = None

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Take a process and begin the episode in it."""
        self._worker = await self._processes.take()
        request = {"verb": "reset", "make": self._make, "task": asdict(task), "seed": seed}
        messages: list[Message] = await self._worker.ask(request)
        return messages

    async def step(self, text: str) -> StepResult:
        """Call the environment's `step` in its process."""
        if self._worker is None:
            raise RuntimeError("step before reset")
        return StepResult(**await self._worker.ask({"verb": "step", "text": text}))

    async def close(self) -> None:
        """End the episode and give the process back."""
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        try:
            if worker.usable:
                await worker.ask({"verb": "close"})
        finally:
            self._processes.give_back(worker)


def main() -> None:
    """Inside the process: serve one episode after the other until stdin closes."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # The environment gets stderr as stdout and an empty stdin, so that its output is no answer and no request is lost.
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    asyncio.run(_serve(requests, answers))


async def _serve(stdin: IO[bytes], answers: IO[bytes]) -> None:
    requests: asyncio.Queue[bytes] = asyncio.Queue()
    # A thread of its own, so that the end of stdin ends the process also while the environment blocks.
    Thread(target=_read, args=(stdin, asyncio.get_running_loop(), requests), daemon=True).start()
    episode: Environment | None = None
    pid = os.getpid()
    while True:
        request = json.loads(await requests.get())
        if request["verb"] == "reset":
            episode = None
        try:
            episode, returned = await _answer(episode, request)
            answer = json.dumps({"number": request["number"], "returned": returned}, default=_plain)
        except BaseException as error:  # noqa: BLE001 - `Worker.ask` raises it in the agent loop
            answer = json.dumps({"number": request["number"], "raised": describe_error(error)})
        if os.getpid() != pid:
            os._exit(0)  # the environment forked: the parent answers
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _read(stdin: IO[bytes], loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[bytes]) -> None:
    for line in stdin:
        loop.call_soon_threadsafe(requests.put_nowait, line)
    if os.getpgrp() == os.getpid():  # started by `Worker.start`, and not by hand in a shell's group
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


async def _answer(episode: Environment | None, request: Mapping[str, Any]) -> tuple[Environment | None, Any]:
    if request["verb"] == "reset":
        make, task = request["make"], request["task"]
        task |= {"prompt": tuple(task["prompt"]), "tools": tuple(task["tools"])}  # JSON has lists for tuples
        episode = make_environment(make["name"], make["options"], make["trusted"])
        return episode, list(await episode.reset(Task(**task), request["seed"]))
    if episode is None:
        raise RuntimeError(f"{request['verb']} before reset")
    if request["verb"] == "step":
        result = await episode.step(request["text"])
        return episode, result._asdict()
    await episode.close()
    return None, None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot leave the environment's process")


if __name__ == "__main__":
    main()
