"""Text that nobody vouches for, as a terminal can show it: no character controls the terminal."""

from __future__ import annotations

HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
HARMLESS |= {127: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
HARMLESS |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
"""What to show for characters that control a terminal, reverse the direction of text, or cannot be encoded."""


def harmless(text: str) -> str:
    r"""The text with visible signs in place of such characters; line feeds and tabs stay.

    >>> harmless("\x1b[2Jdone\n")
    '␛[2Jdone\n'
    """
    return text.translate(HARMLESS)
