"""An environment's error as one line with the place that raised it."""

from __future__ import annotations

import os
from itertools import dropwhile
from traceback import walk_tb

MAX_CHARACTERS = 500
"""Characters of the error's message; the rest is cut."""

HERE = os.path.dirname(__file__)


def describe_error(error: BaseException) -> str:
    """`KeyError: 'age' (my_envs.py:12)`: type, message, line of the environment, innermost line."""
    try:
        text = f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    except Exception:  # noqa: BLE001 - the `__str__` of a user's exception class may raise anything
        return type(error).__name__
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    outside = dropwhile(lambda frame: os.path.dirname(frame[0]) == HERE, frames)  # outermost frame first
    places = [f"{os.path.basename(file)}:{line}" for file, line in outside]
    if not places:
        return text
    return f"{text} ({places[0]})" if places[0] == places[-1] else f"{text} ({places[0]}, in {places[-1]})"
