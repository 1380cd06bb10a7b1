"""What lies in a run's object store: the mark of the run, and a manifest for each checkpoint.

A checkpoint exists once its manifest does, because the manifest is written last.
"""

from __future__ import annotations

import re
import uuid
from pathlib import PurePosixPath
from typing import Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from service.errors import StoreFailed, UserError
from service.run.folder import CHECKPOINTS
from service.store.objects import Objects

FORMAT: Literal[1] = 1
RUN = "run.json"
REACHED = "reached.json"
FILES = "files"
MANIFEST = re.compile(rf"{CHECKPOINTS}/step_(\d{{1,18}})/store\.json", re.ASCII)


def manifest_name(step: int) -> str:
    """The name of the manifest of a step's checkpoint."""
    return f"{CHECKPOINTS}/step_{step}/store.json"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_Record):
    """One file of a checkpoint: the object that holds it, its size and checksum."""

    object: str
    bytes: int = Field(ge=0)
    xxh3_64: str


class StoredCheckpoint(_Record):
    """The manifest of a checkpoint in the store: everything from which an empty disk becomes the run's folder."""

    format: int = FORMAT
    run: str
    step: int
    """Optimizer steps that the weights have had."""
    accepted_tokens: int
    """Tokens that the buffer had accepted at the position at which its journal is cut."""
    files: dict[str, StoredFile]
    """By path in the run folder."""
    xxh3_64: str = ""
    """Checksum of the manifest with this field empty."""

    @field_validator("files")
    @classmethod
    def _lie_in_the_run_folder(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        for path in files:
            parts = PurePosixPath(path).parts
            if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
                raise ValueError(f"{path!r} is no path in the run folder")
        return files

    def sealed(self) -> bytes:
        """The manifest's bytes, with its checksum."""
        return self.model_copy(update={"xxh3_64": self._checksum()}).model_dump_json(indent=1).encode()

    def _checksum(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.model_copy(update={"xxh3_64": ""}).model_dump_json().encode())

    @property
    def objects(self) -> dict[str, int]:
        """The size of every object that the checkpoint needs, by name."""
        return {file.object: file.bytes for file in self.files.values()}

    def missing(self, sizes: dict[str, int]) -> str | None:
        """Which of the checkpoint's objects the store lacks, or has in another size; None: it has all."""
        for name, size in self.objects.items():
            if sizes.get(name) != size:
                return f"{name} is missing" if name not in sizes else f"{name} has another size than was written"
        return None

    @classmethod
    def read(cls, objects: Objects, step: int) -> Self:
        """The manifest of a step.

        Raises:
            UserError: it is damaged, or another version of Baton wrote it.
        """
        name = manifest_name(step)
        try:
            found = cls.model_validate_json(b"".join(objects.get(name)))
        except ValidationError as error:
            raise UserError(f"{name} is damaged ({error.errors()[0]['msg']})") from None
        if found.format != FORMAT:
            raise UserError(f"{name} is of format {found.format}, this Baton reads format {FORMAT}")
        if found.xxh3_64 != found._checksum() or found.step != step:
            raise UserError(f"{name} is damaged (its checksum is another one)")
        return found


class RunMark(_Record):
    """Which run a store holds, and which process writes into it."""

    format: Literal[1] = FORMAT
    run: str
    """The run's own id, which its folder has too."""
    owner: str
    """The newest process that began to write; an older one stops."""

    @classmethod
    def new(cls, run: str | None = None) -> Self:
        """The mark of a new process, of a new run or of the one with that id."""
        return cls(run=run or uuid.uuid4().hex, owner=uuid.uuid4().hex)


class Reached(_Record):
    """How far a run came, for the one that goes on from an older checkpoint."""

    owner: str
    step: int
    accepted_tokens: int


def read_mark(objects: Objects, sizes: dict[str, int]) -> RunMark | None:
    """The mark of the run that a store holds; None if it holds none.

    Raises:
        UserError: it holds something else.
    """
    if RUN not in sizes:
        if sizes:
            raise UserError(f"{objects.url} holds other files ({min(sizes)}, ...) and no run; give an empty place")
        return None
    try:
        return RunMark.model_validate_json(b"".join(objects.get(RUN)))
    except ValidationError:
        raise UserError(f"{objects.url}: its {RUN} is not of a run, or of another version of Baton") from None


def read_reached(objects: Objects, sizes: dict[str, int]) -> Reached | None:
    """How far the run came; None where that is not known."""
    if REACHED not in sizes:
        return None
    try:
        return Reached.model_validate_json(b"".join(objects.get(REACHED)))
    except (ValidationError, StoreFailed):
        return None


def stored_steps(sizes: dict[str, int]) -> list[int]:
    """The steps that have a manifest, newest first."""
    return sorted((int(found[1]) for found in map(MANIFEST.fullmatch, sizes) if found), reverse=True)
