"""Runs the commands that need Ray; only this module of `service` imports `actors`."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from service.errors import UserError


def in_ray(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Run the command `arguments.name`. Returns the exit code. `UserError` if Python finds another package named
    `actors` before Baton's."""
    found, beside = find_spec("actors"), Path(__file__).parents[2] / "actors" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() != beside.resolve():
        other = "is missing" if found is None else f"is {found.origin or 'a folder without __init__.py'}"
        raise UserError(f"the package actors {other}, not {beside}; take the other one off PYTHONPATH, or uninstall it")
    from actors.driver.commands import COMMANDS

    return COMMANDS[arguments.name](arguments, overrides)
