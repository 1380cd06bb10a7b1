"""The beginning of a run with an object store: the store is this run's, and nobody else writes into it from now on.

A store is claimed before Ray starts: a wrong address, a bucket that is not there, and rights that are missing end the
command in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from service.config import Config
from service.errors import StoreFailed, UserError
from service.files import write_atomic
from service.run.folder import FINAL, STORE_MARK, SUMMARY
from service.store.contents import RUN, RunMark, read_mark, stored_steps
from service.store.objects import Objects
from service.store.uploads import Uploads


class Lost(NamedTuple):
    """Accepted tokens of a run that were behind the checkpoint from which an empty disk was filled."""

    owner: str
    """The process that lost them; the buffer counts the tokens of each once."""
    tokens: int


class FolderMark(BaseModel):
    """What a run's folder has about its store: the file `store.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    owner: str
    previous: str = ""
    """The owner before; a process may have been killed before it wrote the new one into the store."""
    lost: Lost | None = None

    @staticmethod
    def read(run: Path) -> FolderMark | None:
        """The mark of a run's folder; None: it never had a store.

        Raises:
            UserError: it is damaged.
        """
        file = run / STORE_MARK
        try:
            return FolderMark.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError:
            raise UserError(f"{file} is damaged; go on in an empty folder: baton run --resume URL") from None

    def write(self, run: Path) -> None:
        """Write the mark into a run's folder."""
        write_atomic(run / STORE_MARK, self.model_dump_json() + "\n")


def claim_store(objects: Objects, config: Config, run: Path, say: Callable[[str], None]) -> Uploads:
    """Claim a store for the run whose folder is `run`, and begin to upload.

    Raises:
        UserError: the store cannot be used, or is another run's, or the run went on from it elsewhere.
    """
    try:
        sizes = objects.sizes()
        held, own = read_mark(objects, sizes), FolderMark.read(run)
        _refuse_other(objects.url, sizes, held, own, run)
        mark = RunMark.new(None if own is None else own.run)
        previous, lost = "" if held is None else held.owner, None if own is None else own.lost
        FolderMark(run=mark.run, owner=mark.owner, previous=previous, lost=lost).write(run)
        data = mark.model_dump_json().encode()
        objects.put(RUN, [data], len(data))
        return Uploads(objects, run, mark, config.trainer.keep_checkpoints, config.run.store_deadline, say)
    except StoreFailed as error:
        raise UserError(f"run.store: {error}") from None


def _refuse_other(url: str, sizes: dict[str, int], held: RunMark | None, own: FolderMark | None, run: Path) -> None:
    if held is None:
        return
    again = f"go on with that run: baton run --resume {url}"
    if own is not None and own.run == held.run:
        if held.owner not in (own.owner, own.previous):
            raise UserError(
                f"run.store: this run went on from {url} in another folder since; what lies in {run} is older: {again}"
            )
    elif stored_steps(sizes) or any(name == SUMMARY or name.startswith(f"{FINAL}/") for name in sizes):
        raise UserError(f"run.store: {url} holds another run; give another place, or {again}")
