"""Tells a running run how many generators the user requests: `baton scale` writes the number into a file of the run's
folder, and the driver reads the file."""

from __future__ import annotations

import json
from pathlib import Path

from service.config import GeneratorConfig
from service.errors import UserError
from service.files import is_locked, write_atomic
from service.run.folder import SCALE


def ask_for(folder: Path, generator: GeneratorConfig, engines: int) -> None:
    """Request `engines` generators from the run in a folder.

    Raises:
        UserError: no process runs the run, or its configuration does not allow this number.
    """
    lowest, highest = generator.min_engines, generator.max_engines
    if lowest == highest:
        bounds = f"{{min: 1, max: {max(engines, highest, 2)}}}"
        raise UserError(f"generator.engines: this run has {highest}, always; give {bounds} to a new run")
    if not lowest <= engines <= highest:
        raise UserError(f"--engines {engines}: generator.engines allows {lowest} to {highest}")
    if not is_locked(folder):
        raise UserError(f"{folder}: no run is going on in this folder")
    write_atomic(folder / SCALE, json.dumps({"engines": engines}) + "\n")


def asked_for(folder: Path, generator: GeneratorConfig, now: int) -> int:
    """The number of generators that the run should have: the requested number, or else the maximum of its
    configuration.

    Returns `now`, the present number, if the file with the request cannot be read.
    """
    lowest, highest = generator.min_engines, generator.max_engines
    try:
        engines = int(json.loads((folder / SCALE).read_text(encoding="utf-8"))["engines"])
    except FileNotFoundError:
        return highest
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return now  # something else wrote the file, or the disk fails
    return min(max(engines, lowest), highest)
