"""Texts of users, models and environments, made safe to print."""

from __future__ import annotations

import unicodedata

HARMLESS = "\n\t"
UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories: control, format (such as a change of direction), half a surrogate pair, private, separators."""


def printable(text: str, keep: str = HARMLESS) -> str:
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


def in_one_line(text: str) -> str:
    """The text made printable, and line ends escaped too."""
    return printable(text, keep="")
