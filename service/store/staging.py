"""What an upload reads: links to files as they are now, which neither a later step nor a removal changes.

    journal/000.journal   growing    -> uploads/3/journal/000.journal       its first bytes, up to the position
    checkpoints/step_40/  removed    -> uploads/3/checkpoints/step_40/...   the same files until they are uploaded

A link takes no room of its own; the file that it leads to stays on the disk until the upload has ended.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from service.run.checkpoints import MANIFEST, PREFIX, Manifest
from service.run.folder import CHECKPOINTS, CONFIG, DATA, EVALUATIONS, JOURNAL, METRICS, MODEL, SCALE, WARM_START

CUT_FILES = (CONFIG, METRICS, EVALUATIONS, SCALE)
"""Files that a run goes on with; those of lines grow, so their size now counts."""
MADE = (DATA, MODEL, WARM_START)
"""Folders of what the run made before its first step."""


class Staged(NamedTuple):
    """One file to upload."""

    path: str
    """In the run folder."""
    file: Path
    """Where its bytes lie."""
    bytes: int
    """How many of them count."""
    checksum: str = ""
    """Of those bytes, where it is known."""
    shared: bool = True
    """Whether its object is named by its content too, so that several checkpoints may need it, and none replaces it."""


def link_journal(run: Path, to: Path, start: int, position: int) -> list[Staged] | None:
    """Link the segments from position `start` on, where the journal began, as far as `position`.

    None where they are not all there: the journal has moved on, or lies on another machine.
    """
    segments = sorted((run / JOURNAL).glob("*.journal"), key=lambda path: int(path.stem))
    starts = [int(path.stem) for path in segments]
    needed = [(path, at) for path, at in zip(segments, starts, strict=True) if start <= at < position]
    ends = [*(at for _, at in needed[1:]), position]
    if not needed or needed[0][1] != start:
        return None
    staged = []
    for (path, at), end in zip(needed, ends, strict=True):
        try:
            staged.append(_link(run, to, path, end - at))
        except FileNotFoundError:
            return None
        if staged[-1].file.stat().st_size < end - at:
            return None
    return staged


def link_checkpoint(run: Path, to: Path, step: int) -> list[Staged]:
    """Link the files of a checkpoint, and those with which a run goes on from it."""
    folder = run / CHECKPOINTS / f"{PREFIX}{step}"
    files = Manifest.model_validate_json((folder / MANIFEST).read_bytes()).files
    staged = [_link(run, to, folder / name, of.bytes)._replace(checksum=of.xxh3_64) for name, of in files.items()]
    staged += [_link(run, to, folder / MANIFEST)]
    staged += [_link(run, to, run / name) for name in CUT_FILES if (run / name).is_file()]
    made = [file for name in MADE for file in sorted((run / name).rglob("*")) if file.is_file()]
    return staged + [Staged(str(file.relative_to(run)), file, file.stat().st_size) for file in made]


def _link(run: Path, to: Path, file: Path, size: int | None = None) -> Staged:
    path = file.relative_to(run)
    link = to / path
    link.parent.mkdir(parents=True, exist_ok=True)
    os.link(file, link)
    return Staged(str(path), link, link.stat().st_size if size is None else size)
