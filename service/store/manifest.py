"""The manifest of a checkpoint in the object store, and the id of the run that a folder and a store have."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from service.errors import UserError
from service.files import write_atomic
from service.run.checkpoints import FileChecksum
from service.run.folder import STORE_MARK
from service.store.objects import Objects

HexId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""A random name; safe as part of an object's name."""


class Damaged(UserError):
    """Raised if a checkpoint in the store is damaged."""


class StoredCheckpoint(BaseModel):
    """The manifest of a checkpoint in the store, with all files that a run needs to continue on an empty disk."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    run: HexId
    """The id of the run; the run's folder has it, too."""
    writer: HexId
    """The id of the process that wrote the checkpoint."""
    step: int
    files: dict[str, FileChecksum]
    """The files of the checkpoint, by their path in the run's folder."""

    @field_validator("files")
    @classmethod
    def _lie_in_the_run_folder(cls, files: dict[str, FileChecksum]) -> dict[str, FileChecksum]:
        for path in map(PurePosixPath, files):
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in str(path):
                raise ValueError(f"{str(path)!r} is no path in the run folder")
        return files

    def object_of(self, path: str) -> str:
        """The name of the object that has a file. Processes that upload at once write different objects."""
        return f"step_{self.step}/{self.writer}/{path}"

    @classmethod
    def read(cls, objects: Objects, step: int) -> Self:
        """Read the manifest of a step's checkpoint.

        Raises:
            Damaged: the manifest is damaged, or of another version of Baton.
            StoreFailed: the store cannot be read.
        """
        try:
            found = cls.model_validate_json(b"".join(objects.get(manifest_name(step))))
        except ValidationError as error:
            raise Damaged(f"{manifest_name(step)} is damaged ({error.errors()[0]['msg']})") from None
        if found.step != step:
            raise Damaged(f"{manifest_name(step)} is of step {found.step}")
        return found


def manifest_name(step: int) -> str:
    """The name of the manifest of a step's checkpoint."""
    return f"step_{step}/manifest.json"


def stored_steps(names: dict[str, int]) -> list[int]:
    """The steps of all checkpoints that have a manifest in the store, newest first. `names`: the store's objects."""
    found = (re.fullmatch(r"step_([0-9]{1,18})/manifest\.json", name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def run_id(folder: Path, run: str | None = None) -> str:
    """The id of the run in a folder. A folder without one gets the id `run`, or a new one if that is None.

    Raises:
        UserError: the file with the id cannot be read.
    """
    file = folder / STORE_MARK
    try:
        if run is not None or not file.exists():
            write_atomic(file, json.dumps({"run": run or uuid.uuid4().hex}) + "\n")
        return str(json.loads(file.read_bytes())["run"])
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{file} cannot be read; go on elsewhere: baton run --resume URL") from None
