"""What a real run of pairs has outside of Ray, or as a user's code: an agent worker, and a scorer.

python -m tests.chaos.outside URL       claims sessions, makes two calls in each, and finishes them
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

AT_ONCE = 4
CALLS = 2
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


def serve(url: str, key: str) -> None:
    """Claim and play one session after the other."""
    while True:
        status, claim = asked(f"{url}/rl/claim", {}, key)
        if status == 200:
            play(url, claim, key)
        else:
            time.sleep(0.2)


def play(url: str, claim: dict[str, Any], key: str) -> None:
    """Make the calls of a session, and finish it."""
    messages = [{"role": "user", "content": "look"}]
    for _ in range(CALLS):
        body = {"model": "policy", "messages": messages}
        status, reply = asked(f"{claim['base_url']}/chat/completions", body, claim["api_key"])
        if status != 200:
            return  # the session is over
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "none"}]
    finished = {"reward": float(random.random() < 0.5), "status": "ok"}
    asked(f"{url}/rl/sessions/{claim['session']}/finish", finished, key)


def main() -> None:
    """Serve until killed."""
    url, key = sys.argv[1], os.environ["BATON_WORKER_KEY"]
    for _ in range(AT_ONCE):
        threading.Thread(target=serve, args=(url, key), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
