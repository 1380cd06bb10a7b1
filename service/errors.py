"""The exceptions that Baton raises on purpose.

Bad *data* raises none of these: it becomes a `service.types.Refusal`, a value with a reason.
A bug raises one of Python's own exceptions (ValueError, TypeError, ...), which nothing catches.
Messages may hold texts of users, models and environments; `printable` makes them safe for a terminal.
"""

from __future__ import annotations

import unicodedata

LAST_LINES, LINE_CHARACTERS = 20, 300
"""Number of last lines of a text that a message shows at most, and maximum characters of each line."""
UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Escaped Unicode categories: control, format (such as a change of direction), surrogates, private, separators."""


class BatonError(Exception):
    """The base class of the exceptions that Baton raises on purpose."""

    exit_code = 1


class UserError(BatonError):
    """The input is wrong; the message gives the problem, the place and the remedy."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration that is malformed, or with which a run would deadlock or train wrongly."""


class JournalError(BatonError):
    """The journal cannot be written or read; the message names file and position."""


class Starved(BatonError):
    """A wait exceeded its deadline; the message names who waited, for what and since when."""


class ProcessLost(BatonError):
    """An actor's process died, is silent, or was restarted and is not set up; the message has the cause."""


class StoreFailed(BatonError):
    """A request to the object store failed; the message has the request and the store's answer."""


class WeightsGone(BatonError):
    """The weights file is gone, because the process that held it died; retry with the next weights file."""


class RunFailed(BatonError):
    """The run cannot make progress; the message gives the reason."""


def printable(text: str, keep: str = "\n\t") -> str:
    r"""The text with every character escaped that could steer a terminal, or that UTF-8 cannot encode.

    >>> print(printable("\x1b[2J gone, \ud800 and \u202e"))
    \x1b[2J gone, \ud800 and \u202e
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in keep and unicodedata.category(character) in UNSAFE
        else character
        for character in text
    )


def last_lines(text: str) -> str:
    """The last lines of a text, made printable, each on an indented line of its own; empty for an empty text.

    >>> print("It failed:" + last_lines("...\\nNo space left on device\\n"))
    It failed:
        ...
        No space left on device
    """
    lines = text.rstrip().splitlines()[-LAST_LINES:]
    return "".join(f"\n    {in_one_line(line[:LINE_CHARACTERS])}" for line in lines)


def in_one_line(text: str) -> str:
    """The text made printable, with line ends escaped too."""
    return printable(text, keep="")
