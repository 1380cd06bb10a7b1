"""Measures how fast this machine now does the work of a run's processes: on each core a pair of processes exchanges
messages.

One process of a pair makes steps (turns of trajectories) of a few tokens, encodes and sends them, as a generator does;
the other process keeps the steps and joins their tokens, as the buffer does. So all cores are busy and processes wait
for messages, as in a run, and other programs on this machine take their share of the cores.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from service.errors import UserError

ROOT = Path(__file__).parents[3]
WARM_UP, SECONDS = 0.5, 2.0
"""Seconds for which a pair runs before its measurement begins, so that all pairs have started; and seconds of the
measurement."""
MAX_PAIRS = 16
"""Maximum number of pairs; a machine with more cores is measured with this number."""
NICENESS = 15
"""Niceness of the pairs of processes. Ray's workers have the same niceness, so all other programs on the machine have
priority."""
KEPT = 256
"""Number of trajectories that the second process of a pair keeps before it drops them all."""
LENGTH = 4
"""Size of the length field before each message, in bytes."""


def message_seconds() -> float:
    """Mean seconds in which a pair of processes exchanges a message and its answer, while a pair runs on each core (on
    at most `MAX_PAIRS` cores).

    Raises:
        UserError: the processes could not run.
    """
    pairs = min(MAX_PAIRS, len(os.sched_getaffinity(0)))
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "service.plan.machine.pace"]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=one_thread, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(pairs)
    ]
    said = [process.communicate() for process in started]
    for process, (_, error) in zip(started, said, strict=True):
        if process.returncode:
            why = error.decode(errors="replace").strip().rpartition("\n")[2]
            raise UserError(f"the pace of this machine cannot be measured: {' '.join(command)}: {why}")
    return pairs * SECONDS / max(1, sum(int(count) for count, _ in said))


def _exchanged() -> int:
    """Number of messages that a pair exchanges during the measured seconds."""
    os.nice(NICENESS)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _answer(theirs)
        os._exit(0)
    theirs.close()
    count, sent, began = 0, 0, time.perf_counter()
    while (now := time.perf_counter() - began) < WARM_UP + SECONDS:
        _send(ours, {"from": "engine", "steps": [_step(sent, sample) for sample in range(2)]})
        _received(ours)
        sent += 1
        count += now > WARM_UP
    return count


def _step(sent: int, sample: int) -> dict[str, Any]:
    """Make a step of a few tokens."""
    tokens = np.arange(8 + sent % 24)
    return {
        "id": f"group={sent // 8}/sample={sample}",
        "index": sent % 4,
        "tokens": tokens.tobytes(),
        "logprobs": (tokens * -0.1).tobytes(),
        "text": " ".join(map(str, tokens.tolist())),
    }


def _answer(connection: socket.socket) -> None:
    """Receive and answer messages until the other process closes the connection."""
    kept: dict[str, list[dict[str, Any]]] = {}
    while (message := _received(connection)) is not None:
        for step in message["steps"]:
            kept.setdefault(step["id"], []).append(step)
        if len(kept) > KEPT:
            kept.clear()
        last = [step["tokens"] for name in list(kept)[-4:] for step in kept[name]]
        row = np.concatenate([np.frombuffer(tokens, int) for tokens in last or [b""]])
        _send(connection, {"accepted": len(message["steps"]), "tokens": int(row.sum())})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode(message)
    connection.sendall(len(encoded).to_bytes(LENGTH, "big") + encoded)


def _received(connection: socket.socket) -> Any:
    """The next message; None after the last message."""
    length = connection.recv(LENGTH, socket.MSG_WAITALL)
    if not length:
        return None
    return msgspec.msgpack.decode(connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))


if __name__ == "__main__":
    print(_exchanged())
