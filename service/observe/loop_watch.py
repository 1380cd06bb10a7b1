"""Names the code that blocks an event loop, in the log: nothing else runs in the process until that code returns."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary, extract_stack

log = logging.getLogger(__name__)

BLOCKED_SECONDS = 5.0
"""Seconds without a turn of the event loop after which the code that runs is named."""
LOOK_SECONDS = 0.5
"""Seconds between two turns that are noted, and between two looks at them."""
LIBRARIES = (str(Path(asyncio.__file__).parent), str(Path(__file__).parents[2] / "service"), threading.__file__)
"""Where the frames lie between the event loop and the code of a user."""


class LoopWatch:
    """Watches the event loop of the thread that makes it, from another thread, until the loop is closed."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._turned = time.monotonic()
        self._is_named = False
        self._turn()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def stop(self) -> None:
        """End the watch."""
        self._ended.set()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._is_named:
            log.warning("the event loop goes on after %.0f s", now - self._turned)
        self._turned, self._is_named = now, False
        self._loop.call_later(LOOK_SECONDS, self._turn)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(LOOK_SECONDS) and not self._loop.is_closed():
            last, looked = looked, time.monotonic()
            was_frozen = looked - last > BLOCKED_SECONDS  # the whole process was
            if looked - self._turned > BLOCKED_SECONDS and not was_frozen and not self._is_named:
                self._is_named = True
                frame = sys._current_frames().get(self._thread)
                log.warning(
                    "the event loop has been blocked for %.0f s by %s: until that returns, no agent and no environment "
                    "goes on; make `play` a plain function (it gets a thread), or await asyncio.to_thread(...)",
                    looked - self._turned,
                    _place(extract_stack(frame)) if frame is not None else "a thread that has ended",
                )


def _place(stack: Sequence[FrameSummary]) -> str:
    """The user's outermost frame, and the innermost one: `my_agent.py:12 play, in socket.py:720 readinto`."""
    frames = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in stack]
    started = next((at for at in range(len(stack) - 1, -1, -1) if stack[at].filename.startswith(LIBRARIES)), -1) + 1
    outer = frames[started] if started < len(frames) else frames[-1]
    return outer if outer == frames[-1] else f"{outer}, in {frames[-1]}"
