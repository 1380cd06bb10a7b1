"""The main program of child processes. A child process is a pair: one process answers requests, and its parent is the
keeper. The keeper ends when the other process has ended, or at SIGTERM. Before it ends, it kills all its descendants.

    parent: SIGTERM, or its death --> keeper --SIGKILL--> the process that answers, and all its descendants

`python -m service.rollout.child_main MODULE` forks. The first process is the keeper; the second calls `MODULE.main()`.
The keeper is the subreaper (prctl(2)) of its descendants: a descendant that leaves its process group or session, or
whose parent ends, becomes a child of the keeper, which ends it with the others.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from service.rollout.user_errors import describe_error

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_SECONDS = 10
"""Seconds in which the descendants must end; afterwards the keeper ends, even if some of them still run."""
SIGNALLED = 128
"""If a signal ended the process that answers, the keeper's exit code is this number plus the signal's number."""


def main() -> None:
    """Fork. The child runs the module that the command line names; the parent waits for the child, ends all other
    descendants, and exits with the child's status."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    child, reaped, status = os.fork(), 0, 0
    if not child:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent's thread may have blocked signals
        import_module(sys.argv[1]).main()
        return

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            if reaped != child:
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    while reaped != child:
        reaped, status = os.wait()  # continues after a signal
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else SIGNALLED - code)


def end_descendants() -> None:
    """Kill all descendants of this process until none is left. (A descendant whose parent ends becomes its child.)

    If the descendants do not end in time, this process ends itself.
    """
    import psutil  # imported late to save memory: there are many keepers, and most only wait

    signal.alarm(KILL_SECONDS)
    listed = Path(f"/proc/self/task/{os.getpid()}/children")  # fast enough for a process that only forks and exits
    with suppress(ChildProcessError):  # no child is left
        while True:
            pids = listed.read_text().split() if listed.exists() else [p.pid for p in psutil.Process().children(True)]
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    signal.alarm(0)


def serve_child(answer: Callable[[Any], Awaitable[Any]]) -> None:
    """Answer requests one after the other, each a line of JSON on stdin, until stdin closes."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Code of users gets stderr as its stdout and an empty stdin, so it can neither read a request nor write an answer.
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    asyncio.run(_serve(answer, requests, answers))


async def _serve(answer: Callable[[Any], Awaitable[Any]], stdin: Any, answers: Any) -> None:
    requests = asyncio.StreamReader(limit=sys.maxsize)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), stdin)
    pid = os.getpid()
    while line := await requests.readline():
        request = json.loads(line)
        try:
            said = json.dumps({"number": request["number"], "returned": await answer(request)}, default=_plain)
        except BaseException as error:  # noqa: BLE001 - `ChildProcess.ask` in the parent raises it again
            said = json.dumps({"number": request["number"], "raised": describe_error(error)})
        if os.getpid() != pid:
            os._exit(0)  # a fork of this process made the answer; only this process may send it
        answers.write(said.encode() + b"\n")
        answers.flush()
    os._exit(0)  # exit at once, whatever threads still run


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # converts numpy numbers
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot leave its process")


if __name__ == "__main__":
    main()
