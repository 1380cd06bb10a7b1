"""Makes hard links to the files of an upload, so that later steps and deletions do not change what is uploaded.

    journal/000.journal   growing    -> uploads/3/journal/000.journal       its bytes up to the checkpoint
    checkpoints/step_40/  removed    -> uploads/3/checkpoints/step_40/...   the same files until they are uploaded

A link takes no space, but its file stays on the disk until the upload has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from service.run.checkpoints import MANIFEST, PREFIX, Manifest
from service.run.folder import CHECKPOINTS, CONFIG, DATA, EVALUATIONS, JOURNAL, METRICS, MODEL, WARM_START

CUT_FILES = (CONFIG, METRICS, EVALUATIONS)
"""Files that a resumed run needs besides the checkpoint. Some of them grow, so only the bytes up to their present size
are uploaded."""
MADE = (DATA, MODEL, WARM_START)
"""Folders with data and models that the run itself made before its first step."""
READ_BYTES = 8 << 20


class Staged(NamedTuple):
    """A file to upload, or the beginning of a file that grows."""

    path: str
    """The file's path in the run's folder."""
    file: Path
    """The file that is read for the upload."""
    size: int
    """Number of bytes to upload, from the beginning of the file."""
    checksum: str = ""
    """Checksum of the bytes to upload; empty if it is not known."""
    shared: bool = True
    """Whether the name of the object includes the checksum, so that several checkpoints can share the object."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes to upload in chunks."""
        left = self.size
        with self.file.open("rb") as file:
            while left > 0 and (chunk := file.read(min(READ_BYTES, left))):
                left -= len(chunk)
                yield chunk


def as_it_is(run: Path, file: Path, shared: bool = True) -> Staged:
    """A file to upload that does not change any more, so that no link is needed. `shared`: as in `Staged`."""
    return Staged(str(file.relative_to(run)), file, file.stat().st_size, shared=shared)


def link_journal(run: Path, to: Path, start: int, position: int) -> list[Staged] | None:
    """The journal from position `start` to `position` as files to upload: links to its segments, made in the folder
    `to`.

    None if some segments are missing: they were removed, or the journal is on another machine.
    """
    segments = {int(path.stem): path for path in (run / JOURNAL).glob("*.journal")}
    starts = sorted(at for at in segments if start <= at < position)
    if starts[:1] != [start]:
        return None
    ends = [*starts[1:], position]
    try:
        staged = [_link(run, to, segments[at], end - at) for at, end in zip(starts, ends, strict=True)]
    except FileNotFoundError:
        return None
    return staged if all(one.file.stat().st_size >= one.size for one in staged) else None


def link_checkpoint(run: Path, to: Path, step: int) -> list[Staged]:
    """The files to upload for a checkpoint: its own files, and the other files that are needed to continue from it.
    Files that may be removed or grow are links, made in the folder `to`."""
    folder = run / CHECKPOINTS / f"{PREFIX}{step}"
    files = Manifest.model_validate_json((folder / MANIFEST).read_bytes()).files
    staged = [_link(run, to, folder / name, of.bytes)._replace(checksum=of.xxh3_64) for name, of in files.items()]
    others = (folder / MANIFEST, *(run / name for name in CUT_FILES))
    staged += [_link(run, to, file) for file in others if file.is_file()]
    return staged + [as_it_is(run, file) for name in MADE for file in sorted((run / name).rglob("*")) if file.is_file()]


def _link(run: Path, to: Path, file: Path, size: int | None = None) -> Staged:
    path = file.relative_to(run)
    link = to / path
    link.parent.mkdir(parents=True, exist_ok=True)
    os.link(file, link)
    return Staged(str(path), link, link.stat().st_size if size is None else size)
