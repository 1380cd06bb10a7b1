"""What a real run of pairs has outside of Ray, or as a user's code: an agent that hands on its sessions, and a scorer.

python -m tests.chaos.outside FOLDER    makes two calls in each session that was handed on, and finishes it
"""

import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

AT_ONCE = 16
CALLS = 2
SILENCE = 120.0
"""Seconds without a request after which a session is lost; longer than `STOP_SECONDS` of `real_pairs`, for which the
outside agent may stand still."""
PATIENCE = 120.0
"""Seconds for which a request is repeated."""


def judge(trajectories: Sequence[Any]) -> list[float]:
    """A random reward for each trajectory."""
    return [random.random() for _ in trajectories]


def asked(url: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
    """POST until there is an answer other than one to come back later; returns status and answer."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                return error.code, None
        except OSError:  # the generator is away, or restarts
            pass
        if time.monotonic() > deadline:
            return 0, None
        time.sleep(0.3)


class HandsOn:
    """Hands on each session through a file, also to an agent worker that comes later."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def play(self, session: Any, task: Any, seed: int) -> None:
        """Hand on the session, and wait for its end."""
        name = session.base_url.split("/s/")[1].removesuffix("/v1")
        (self._folder / name).write_text(json.dumps([session.base_url, session.key]))
        (self._folder / name).rename(self._folder / f"{name}.json")
        await session.until_finished(SILENCE)

    async def resume(self, session: Any, task: Any, seed: int) -> None:
        """Wait for the end of a session that was handed on."""
        await session.until_finished(SILENCE)


def serve(folder: Path) -> None:
    """Play one session after the other."""
    while True:
        for file in folder.glob("*.json"):
            with suppress(FileNotFoundError):  # another thread has it
                play(*json.loads(file.replace(file.with_suffix(".taken")).read_text()))
        time.sleep(0.2)


def play(base_url: str, key: str) -> None:
    """Make the calls of a session, and finish it."""
    messages = [{"role": "user", "content": "look"}]
    for _ in range(CALLS):
        body = {"model": "policy", "messages": messages}
        status, reply = asked(f"{base_url}/chat/completions", body, key)
        if status != 200:
            return  # the session is over
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "none"}]
    finished = {"reward": float(random.random() < 0.5), "status": "ok"}
    asked(f"{base_url.split('/s/')[0]}/rl/sessions/mine/finish", finished, key)


def main() -> None:
    """Serve until killed."""
    for _ in range(AT_ONCE):
        threading.Thread(target=serve, args=(Path(sys.argv[1]),), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
