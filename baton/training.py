"""Starts a training run from Python."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path


def run(*files: str | Path, overrides: Sequence[str] = (), resume: str | None = None) -> int:
    """Train like `baton run --config FILE ... section.key=value ...`. Returns the exit code.

    `resume`: the folder, name or store address of a run to continue from its newest checkpoint. The exit code is 0 if
    the run reached its end, and 128 + n after signal n. Ray, vLLM and torch are imported only here.

    Raises:
        BatonError: the configuration is wrong, or the run failed; the message is what the command prints.
    """
    from actors.driver.commands import COMMANDS

    arguments = Namespace(name="run", config=[Path(file) for file in files], overrides=[], resume=resume)
    return COMMANDS["run"](arguments, list(overrides))
