"""An environment's error as one line with the place that raised it."""

from __future__ import annotations

import os

MAX_CHARACTERS = 500
"""Characters of the error's message; the rest is cut."""

HERE = os.path.dirname(__file__)


def describe_error(error: BaseException) -> str:
    """`KeyError: 'age' (my_envs.py:12)`: type, message, line of the environment, innermost line."""
    try:
        text = f"{type(error).__name__}: {error}"[:MAX_CHARACTERS]
    except Exception:  # noqa: BLE001 - the `__str__` of a user's exception class may raise anything
        return type(error).__name__
    places = _places(error)
    if not places:
        return text
    return f"{text} ({places[0]})" if places[0] == places[-1] else f"{text} ({places[0]}, in {places[-1]})"


def _places(error: BaseException) -> list[str]:
    """`file:line` of each frame, outermost first, from the first frame outside this package on."""
    places: list[str] = []
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if places or os.path.dirname(file) != HERE:
            places.append(f"{os.path.basename(file)}:{frame.tb_lineno}")
        frame = frame.tb_next
    return places
