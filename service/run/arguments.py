"""Types of command-line arguments that several commands share."""

from __future__ import annotations

import argparse

RUN_HELP = "a run folder, or the name of a run"
NEWEST_HELP = f"{RUN_HELP} (default: the newest run in runs/)"


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number from 1 on")
    return int(text)
