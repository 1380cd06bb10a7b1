"""The command `baton`."""

from service.cli.parser import main

__all__ = ["main"]
