"""How many generators a user asks a running run for: a file in its folder, which the driver reads."""

from __future__ import annotations

import json
from pathlib import Path

from service.config import GeneratorConfig
from service.errors import UserError
from service.files import is_locked, write_atomic
from service.run.folder import SCALE


def ask_for(folder: Path, generator: GeneratorConfig, engines: int) -> None:
    """Ask the run in a folder for so many generators.

    Raises:
        UserError: no run is going on there, or its configuration does not allow that number.
    """
    least, most = generator.min_engines, generator.max_engines
    if least == most:
        bounds = f"{{min: 1, max: {max(engines, most, 2)}}}"
        raise UserError(f"generator.engines: this run has {most}, always; give {bounds} to a new run")
    if not least <= engines <= most:
        raise UserError(f"--engines {engines}: generator.engines allows {least} to {most}")
    if not is_locked(folder):
        raise UserError(f"{folder}: no run is going on in this folder")
    write_atomic(folder / SCALE, json.dumps({"engines": engines}) + "\n")


def asked_for(folder: Path, generator: GeneratorConfig, now: int) -> int:
    """How many generators the run is to have: as asked for, else as many as its configuration allows.

    It stays as it is now while the file cannot be read.
    """
    least, most = generator.min_engines, generator.max_engines
    try:
        engines = int(json.loads((folder / SCALE).read_text(encoding="utf-8"))["engines"])
    except FileNotFoundError:
        return most
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return now  # another hand wrote it, or the disk fails
    return min(max(engines, least), most)
