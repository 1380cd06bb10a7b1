"""What an environment raised, in a line that says where."""

from __future__ import annotations

import os

MOST_CHARACTERS = 500
"""Of what was raised; the rest is left out."""

HERE = os.path.dirname(__file__)


def in_words(error: BaseException) -> str:
    """`KeyError: 'age' (my_envs.py:12)`: the line of the environment, and the last one where that is another."""
    try:
        words = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    except Exception:  # noqa: BLE001 - whatever a user's class does when it is shown
        return type(error).__name__
    places = _places(error)
    if not places:
        return words
    return f"{words} ({places[0]})" if places[0] == places[-1] else f"{words} ({places[0]}, in {places[-1]})"


def _places(error: BaseException) -> list[str]:
    """Where the error came through, outermost first, without those who asked the environment."""
    found: list[str] = []
    frame = error.__traceback__
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if found or os.path.dirname(file) != HERE:
            found.append(f"{os.path.basename(file)}:{frame.tb_lineno}")
        frame = frame.tb_next
    return found
