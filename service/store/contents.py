"""The objects in a run's object store: one object names the run; each checkpoint has objects for its files, and a
manifest that lists them, which is written last."""

from __future__ import annotations

import re
import uuid
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from service.errors import StoreFailed, UserError
from service.files import write_atomic
from service.run.folder import CHECKPOINTS, FINAL, STORE_MARK, SUMMARY
from service.store.objects import Objects

FORMAT: Literal[1] = 1
RUN = "run.json"
REACHED = "reached.json"
FILES = "files"
MANIFEST = re.compile(rf"{CHECKPOINTS}/step_(\d{{1,18}})/store\.json", re.ASCII)


def manifest_name(step: int) -> str:
    """The name of the manifest of a step's checkpoint."""
    return f"{CHECKPOINTS}/step_{step}/store.json"


def stored_steps(sizes: dict[str, int]) -> list[int]:
    """The steps of all checkpoints that have a manifest in the store, newest first. `sizes`: sizes of the objects by
    name."""
    return sorted((int(found[1]) for found in map(MANIFEST.fullmatch, sizes) if found), reverse=True)


class Damaged(UserError):
    """Raised if a checkpoint in the store is damaged."""


RunId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
"""The id of a run; safe as part of a folder's name."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A number of tokens or steps, small enough that sums fit into the journal."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredFile(_Record):
    """One file of a checkpoint in the store: the object that has its bytes, its size and its checksum."""

    object: str
    bytes: int = Field(ge=0)
    xxh3_64: str


class StoredCheckpoint(_Record):
    """The manifest of a checkpoint in the store. It lists all files that are needed to restore the run's folder on an
    empty disk."""

    format: int = FORMAT
    run: RunId
    step: Count
    """Number of optimizer steps that produced the checkpoint's weights."""
    accepted_tokens: Count
    """Number of tokens that the buffer had accepted at the position at which the checkpoint's journal ends."""
    files: dict[str, StoredFile]
    """The files of the checkpoint, by their path in the run's folder."""
    xxh3_64: str = ""
    """Checksum of the manifest, computed with this field empty."""

    @field_validator("files")
    @classmethod
    def _lie_in_the_run_folder(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        for path in files:
            parts = PurePosixPath(path).parts
            if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
                raise ValueError(f"{path!r} is no path in the run folder")
        return files

    def sealed(self) -> bytes:
        """The manifest as bytes, including its checksum."""
        return self.model_copy(update={"xxh3_64": self._checksum()}).model_dump_json(indent=1).encode()

    def _checksum(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.model_copy(update={"xxh3_64": ""}).model_dump_json().encode())

    @property
    def objects(self) -> dict[str, int]:
        """For each object that the checkpoint needs, its size in bytes."""
        return {file.object: file.bytes for file in self.files.values()}

    def missing(self, sizes: dict[str, int]) -> str | None:
        """A text that names an object of the checkpoint that is missing in the store or has another size there; None if
        the store has all objects. `sizes`: sizes of the store's objects by name."""
        for name, size in self.objects.items():
            if sizes.get(name) != size:
                return f"{name} is missing" if name not in sizes else f"{name} has another size than was written"
        return None

    @classmethod
    def read(cls, objects: Objects, step: int, run: str, sizes: dict[str, int]) -> Self:
        """Read the manifest of a step's checkpoint, and check that it belongs to the run `run` and that all its objects
        are in the store.

        Raises:
            Damaged: the manifest is damaged, or of another version of Baton or another run; or an object is missing.
        """
        name = manifest_name(step)
        try:
            found = cls.model_validate_json(b"".join(objects.get(name)))
        except ValidationError as error:
            raise Damaged(f"{name} is damaged ({error.errors()[0]['msg']})") from None
        if found.format != FORMAT:
            raise Damaged(f"{name} is of format {found.format}, this Baton reads format {FORMAT}")
        if found.xxh3_64 != found._checksum() or found.step != step:
            raise Damaged(f"{name} is damaged (its checksum is another one)")
        if found.run != run:
            raise Damaged("it is of another run")
        if missing := found.missing(sizes):
            raise Damaged(missing)
        return found


class RunMark(_Record):
    """The object that names the run which a store holds, and the process that writes to the store."""

    format: Literal[1] = FORMAT
    run: RunId
    """The id of the run; the run's folder has it, too."""
    owner: str
    """Id of the process that claimed the store last; older processes stop writing to it."""

    @staticmethod
    def read(objects: Objects, sizes: dict[str, int]) -> RunMark | None:
        """Read the mark of the run that a store holds; None if the store is empty.

        Raises:
            UserError: the object is not the mark of a run, or the store has other objects but no mark.
        """
        if RUN not in sizes:
            if sizes:
                raise UserError(f"{objects.url} holds other files ({min(sizes)}, ...) and no run; give an empty place")
            return None
        try:
            return RunMark.model_validate_json(b"".join(objects.get(RUN)))
        except ValidationError:
            raise UserError(f"{objects.url}: its {RUN} is not of a run, or of another version of Baton") from None


class ReachedStep(_Record):
    """The newest optimizer step that a run has reached: a resumed run, which continues from an older checkpoint, learns
    from it how many steps and tokens were lost."""

    owner: str
    step: Count
    accepted_tokens: Count

    @staticmethod
    def read(objects: Objects, sizes: dict[str, int]) -> ReachedStep | None:
        """Read the newest step that the run has reached; None if the store does not have it, or it cannot be read."""
        try:
            return ReachedStep.model_validate_json(b"".join(objects.get(REACHED))) if REACHED in sizes else None
        except (ValidationError, StoreFailed):
            return None


class FolderMark(_Record):
    """The file `store.json` in a run's folder: the id of the run, and the processes that claimed the store for this
    folder."""

    run: RunId
    owners: tuple[str, ...]
    """Ids of all processes that claimed the store for this folder, or from whose checkpoint the folder was restored,
    newest last. The store may name an older process than the last one: the last process may have been killed before it
    wrote its id to the store, or a write that was not answered may take effect late."""
    lost: tuple[str, Count] | None = None
    """(owner, number of tokens): the number of tokens that this process had accepted after the checkpoint from which
    the folder was restored. The buffer counts these tokens once per process."""

    @staticmethod
    def read(run: Path) -> FolderMark | None:
        """Read the file `store.json` of a run's folder; None if the run never had a store.

        Raises:
            UserError: the file cannot be read.
        """
        file = run / STORE_MARK
        try:
            return FolderMark.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise UserError(
                f"{file} cannot be read, or is of another version of Baton; go on elsewhere: baton run --resume URL"
            ) from None

    def write(self, run: Path) -> None:
        """Write the file `store.json` into a run's folder."""
        write_atomic(run / STORE_MARK, self.model_dump_json() + "\n")


def claimed(objects: Objects, run: Path) -> RunMark:
    """Claim the store for this run: from now on no other process may write to it.

    The store is claimed before Ray starts, so that a wrong address, a missing bucket or missing rights end the command
    at once with a one-line error.

    Raises:
        UserError: the store belongs to another run, or the run was continued from the store elsewhere.
        StoreFailed: the store cannot be used.
    """
    sizes = objects.sizes()
    held, own = RunMark.read(objects, sizes), FolderMark.read(run)
    if held is not None:
        _refuse_other(objects.url, sizes, held, own, run)
    mark = RunMark(run=uuid.uuid4().hex if own is None else own.run, owner=uuid.uuid4().hex)
    owners, lost = ((), None) if own is None else (own.owners, own.lost)
    FolderMark(run=mark.run, owners=(*owners, mark.owner), lost=lost).write(run)
    data = mark.model_dump_json().encode()
    objects.put(RUN, [data], len(data))
    return mark


def _refuse_other(url: str, sizes: dict[str, int], held: RunMark, own: FolderMark | None, run: Path) -> None:
    again = f"go on with that run: baton run --resume {url}"
    if own is not None and own.run == held.run:
        if held.owner not in own.owners:
            raise UserError(
                f"run.store: this run went on from {url} in another folder since; what lies in {run} is older: {again}"
            )
    elif stored_steps(sizes) or any(name == SUMMARY or name.startswith(f"{FINAL}/") for name in sizes):
        raise UserError(f"run.store: {url} holds another run; give another place, or {again}")
