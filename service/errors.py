"""The exceptions that Baton raises on purpose.

Bad *data* raises none of these: it becomes a `service.types.Refusal`, a value with a reason.
A bug raises one of Python's own exceptions (ValueError, TypeError, ...), which nothing catches.
Messages may hold texts of users, models and environments; `printable` makes them safe for a terminal.
"""

from __future__ import annotations

import unicodedata

LAST_LINES, LINE_CHARACTERS = 20, 300
"""Maximum number of last lines of a text that a message shows, and maximum characters of each of these lines."""
UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that are escaped: control, format (such as direction), surrogates, private use, separators."""


class BatonError(Exception):
    """The base class of the exceptions that Baton raises on purpose."""

    exit_code = 1


class UserError(BatonError):
    """Raised if the user's input is wrong; the message says what is wrong, where, and how to correct it."""

    exit_code = 2


class ConfigError(UserError):
    """Raised if a configuration is malformed, or if a run with it would deadlock or train wrongly."""


class JournalError(BatonError):
    """Raised if the journal cannot be written or read; the message names file and position."""


class Starved(BatonError):
    """Raised if a wait exceeded its deadline; the message says who waited, for what and since when."""


class ProcessLost(BatonError):
    """Raised if an actor's process died, does not answer, or was restarted and is not set up."""


class StoreFailed(BatonError):
    """Raised if a request to the object store failed; the message has the request and the store's answer."""


class WeightsGone(BatonError):
    """Raised if the process that held a file of weights has died, and the file with it; retry with the next weights."""


class RunFailed(BatonError):
    """Raised if the run cannot continue; the message gives the reason."""


def printable(text: str, keep: str = "\n\t") -> str:
    r"""The text with escapes in place of characters that could control a terminal, or that UTF-8 cannot encode.

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
    """The last lines of a text, printable and indented, each on a new line; empty for an empty text.

    >>> print("It failed:" + last_lines("...\\nNo space left on device\\n"))
    It failed:
        ...
        No space left on device
    """
    lines = text.rstrip().splitlines()[-LAST_LINES:]
    return "".join(f"\n    {in_one_line(line[:LINE_CHARACTERS])}" for line in lines)


def in_one_line(text: str) -> str:
    """The text as one printable line: line ends are escaped, too."""
    return printable(text, keep="")
