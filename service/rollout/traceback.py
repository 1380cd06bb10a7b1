"""An environment's error as one line with the place that raised it."""

from __future__ import annotations

import os
from itertools import dropwhile
from traceback import walk_tb
from types import TracebackType

MAX_CHARACTERS = 500
"""Characters of the error's message; the rest is cut."""
MAX_NAME_CHARACTERS = 80

HERE = os.path.dirname(__file__)


def describe_error(error: BaseException) -> str:
    """`KeyError: 'age' (my_envs.py:12)`: type, message, line of the environment, innermost line."""
    name = type_name(error)
    try:
        text = f"{name}: {error}"[:MAX_CHARACTERS]
    except BaseException:  # noqa: BLE001 - the `__str__` of a user's exception class may raise anything
        return name
    # Not `error.__traceback__`, which a user's class may define as it likes.
    traceback: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback)]
    outside = dropwhile(lambda frame: os.path.dirname(frame[0]) == HERE, frames)  # outermost frame first
    places = [f"{os.path.basename(file)}:{line}" for file, line in outside]
    if places:
        text += f" ({places[0]})" if places[0] == places[-1] else f" ({places[0]}, in {places[-1]})"
    return text


def type_name(value: object) -> str:
    """The name of a value's class, also where a metaclass defines `__name__`."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return str.__str__(name)[:MAX_NAME_CHARACTERS]
