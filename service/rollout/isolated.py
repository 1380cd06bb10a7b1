"""The inside of an environment's own process: requests from stdin, answers to stdout, one JSON object a line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping
from threading import Thread
from typing import IO, Any

import numpy as np

from service.rollout.environment import Environment, Task
from service.rollout.environments.registry import make_environment
from service.rollout.traceback import describe_error


def main() -> None:
    """Serve one episode after the other until stdin closes."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # What the environment prints must not stand between answers; what it reads, or whatever it starts, is no request.
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    asyncio.run(_serve(requests, answers))


async def _serve(stdin: IO[bytes], answers: IO[bytes]) -> None:
    requests: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    # A thread of its own notices the end of stdin also while the environment blocks.
    Thread(target=_read, args=(stdin, loop, requests), daemon=True).start()
    episode: Environment | None = None
    pid = os.getpid()
    while True:
        request = json.loads(await requests.get())
        if request["verb"] == "reset":
            episode = None
        try:
            episode, returned = await _answer(episode, request)
            answer = json.dumps({"number": request["number"], "returned": returned}, default=_plain)
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is read
            answer = json.dumps({"number": request["number"], "raised": describe_error(error)})
        if os.getpid() != pid:
            os._exit(0)  # the environment forked: the other process answers
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _read(stdin: IO[bytes], loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[bytes]) -> None:
    for line in stdin:
        loop.call_soon_threadsafe(requests.put_nowait, line)
    if os.getpgrp() == os.getpid():  # and not the group of whoever started this by hand
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


async def _answer(episode: Environment | None, request: Mapping[str, Any]) -> tuple[Environment | None, Any]:
    if request["verb"] == "reset":
        make = request["make"]
        episode = make_environment(make["name"], make["options"], make["trusted"])
        task = request["task"]
        task = Task(**{**task, "prompt": tuple(task["prompt"]), "tools": tuple(task["tools"])})
        return episode, list(await episode.reset(task, request["seed"]))
    if episode is None:
        raise RuntimeError(f"{request['verb']} before reset")
    if request["verb"] == "step":
        result = await episode.step(request["text"])
        return episode, result._asdict()
    await episode.close()
    return None, None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):  # numbers like Python's own, but not for JSON
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot leave the environment's process")


if __name__ == "__main__":
    main()
