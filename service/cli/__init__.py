"""The command `baton`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Ctrl-C ends the command without a traceback, even during imports."""
    try:
        from service.cli import parser

        return parser.main(argv)
    except KeyboardInterrupt:
        return 130
