"""Finds the code that blocks an event loop: until this code returns, no other task of the loop runs."""

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

WATCH = "loop-watch"
"""Name of the thread that watches."""
BLOCKED_SECONDS = 5.0
"""If the event loop runs no callback for this many seconds, the code that blocks it is named."""
LOOK_SECONDS = 0.5
"""Seconds between two times that the event loop records, and between two checks of the newest recorded time by the
watching thread."""
ROOT = Path(__file__).parents[2]
LIBRARIES = (str(Path(asyncio.__file__).parent), f"{ROOT}/service", f"{ROOT}/actors", threading.__file__)
"""Libraries whose stack frames lie between the event loop and a user's code."""
REMEDY = "set env.isolation=process for an environment; an agent may await asyncio.to_thread(...) or have a plain play"


class LoopWatch:
    """Watches the event loop of the thread that creates this object, from another thread, until the loop is closed."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._blocked: dict[str, str] = {}
        """The first message about each place in the code that has blocked the loop, by place."""
        self._turn()
        threading.Thread(target=self._watch, name=WATCH, daemon=True).start()

    async def blocked(self, known: int) -> str:
        """Wait until more than `known` places in the code have blocked the loop. Returns the message about the next
        place after the first `known`. Call this in another event loop, which is not blocked."""
        while len(self._blocked) <= known:
            await asyncio.sleep(LOOK_SECONDS)
        return [*self._blocked.values()][known]

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._loop.call_later(LOOK_SECONDS, self._turn)

    def _watch(self) -> None:
        named = 0.0
        while not self._loop.is_closed():
            looked = time.monotonic()
            time.sleep(LOOK_SECONDS)
            now, turned = time.monotonic(), self._turned
            is_blocked = now - turned > BLOCKED_SECONDS > now - looked  # otherwise the whole process was stopped
            if is_blocked and turned != named and (frame := sys._current_frames().get(self._thread)) is not None:
                named, (place, is_users) = turned, _place(extract_stack(frame))
                line = (
                    f"the event loop has been blocked for {now - turned:.0f} s by {place}: until that returns, no "
                    f"agent and no environment goes on; {REMEDY if is_users else 'Ray or the machine stood still'}"
                )
                log.warning(line)
                self._blocked.setdefault(place, line)


def _place(stack: Sequence[FrameSummary]) -> tuple[str, bool]:
    """Describe a stack by two frames: the first frame of user code, and the innermost frame, as in `my_agent.py:12
    play, in socket.py:720 readinto`. Also returns whether there is user code."""
    frames = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in stack]
    is_library = [frame.filename.startswith(LIBRARIES) or "/site-packages/ray/" in frame.filename for frame in stack]
    starts = [at for at in range(1, len(stack)) if is_library[at - 1] and not is_library[at]]
    started = starts[-1] if starts else 0
    return ", in ".join(dict.fromkeys((*frames[started : started + 1], frames[-1]))), bool(starts)
