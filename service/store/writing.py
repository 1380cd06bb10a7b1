"""Writes to a run's object store: first the files of a checkpoint, then its manifest. Then old checkpoints are deleted.

Two processes may write at once if a run was resumed elsewhere while the older process is still alive. The store then
belongs to the newer process. Before a process writes, it reads the store's mark, and it stops if the mark names another
process. It deletes only objects that it listed before it read the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import xxhash

from service.errors import StoreFailed, UserError
from service.run.folder import CHECKPOINTS
from service.store.contents import (
    FILES,
    REACHED,
    RUN,
    Damaged,
    ReachedStep,
    RunMark,
    StoredCheckpoint,
    StoredFile,
    manifest_name,
    stored_steps,
)
from service.store.objects import Objects
from service.store.staging import Staged


class TakenOver(Exception):
    """Raised if another process has claimed the store; the message says which kind of process."""


class StoreWriter:
    """Writes to the store for the process that claimed it with `mark`.

    Its methods raise `StoreFailed` if the store fails, `OSError` if the disk fails, and `TakenOver` if another process
    has claimed the store.
    """

    def __init__(self, objects: Objects, mark: RunMark, keep: int, uploaded: Callable[[int], None]) -> None:
        """`keep`: number of checkpoints that the store keeps; `uploaded`: called for each uploaded chunk with its
        number of bytes."""
        self._objects, self._mark, self._keep, self._uploaded = objects, mark, keep, uploaded
        self._known = objects.sizes()
        """Sizes of the objects in the store, by name."""
        self._read: dict[str, int] = {}
        """Bytes that were read for each object that is not stored yet."""
        self._digests: dict[tuple[str, int, int, int], str] = {}

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint in the store; None if the store has no checkpoint."""
        return next(iter(stored_steps(self._known)), None)

    def note(self, step: int, accepted_tokens: int) -> None:
        """Write the newest step and the number of accepted tokens to the store."""
        self._check_owner()
        noted = ReachedStep(owner=self._mark.owner, step=step, accepted_tokens=accepted_tokens)
        self._put_bytes(REACHED, noted.model_dump_json().encode())

    def put(self, files: Sequence[Staged], done: set[str]) -> dict[str, StoredFile]:
        """Write those of the files that the store does not have yet, and return the object of every file, by the file's
        path. The path of each file that is in the store is added to `done`."""
        self._check_owner()
        return {staged.path: self._put(staged, done) for staged in files}

    def complete(self, step: int, accepted_tokens: int, files: dict[str, StoredFile]) -> None:
        """Write the manifest of a checkpoint whose files are stored, then check that all these files are still in the
        store."""
        manifest = StoredCheckpoint(run=self._mark.run, step=step, accepted_tokens=accepted_tokens, files=files)
        self._check_owner()
        self._put_bytes(manifest_name(step), manifest.sealed())
        self._known = self._objects.sizes()
        if missing := manifest.missing(self._known):
            raise StoreFailed(f"{missing}: another process deleted it meanwhile")

    def sweep(self, step: int) -> None:
        """Delete checkpoints that are too old or of a later step than `step`, and all files that no remaining
        checkpoint needs."""
        needed, kept = set[str](), 0
        for found in stored_steps(self._known):
            if found <= step and kept < self._keep:
                try:
                    manifest = StoredCheckpoint.read(self._objects, found, self._mark.run, self._known)
                except Damaged:
                    continue
                needed |= {manifest_name(found), *manifest.objects}
                kept += 1
        mine = [name for name in self._known if name.startswith((f"{FILES}/", f"{CHECKPOINTS}/"))]
        manifests = set(map(manifest_name, stored_steps(self._known)))
        old = sorted((name for name in mine if name not in needed), key=lambda name: name not in manifests)
        self._check_owner()
        self._objects.delete(old)
        for name in old:
            del self._known[name]

    def _put(self, staged: Staged, done: set[str]) -> StoredFile:
        checksum = (staged.checksum or self._digest(staged)) if staged.shared else ""
        name = f"{FILES}/{staged.path}/{checksum}" if staged.shared else staged.path
        is_there = self._known.get(name) == staged.size if staged.shared else staged.path in done
        if not is_there:
            hasher = xxhash.xxh3_64()
            self._objects.put(name, self._counted(name, staged.chunks(), hasher), staged.size)
            if checksum and hasher.hexdigest() != checksum:
                self._objects.delete([name])  # name and size match the expected file
                raise StoreFailed(f"{staged.path} has other bytes than were written; its disk is damaged")
            self._known[name] = staged.size
            self._read.pop(name, None)
            self._uploaded(0)
        done.add(staged.path)
        return StoredFile(object=name, bytes=staged.size, xxh3_64=checksum)

    def _digest(self, staged: Staged) -> str:
        """The checksum of a file; a file that has not changed is not read again."""
        stat = staged.file.stat()
        key = (staged.path, staged.size, stat.st_ino, stat.st_mtime_ns)
        if key not in self._digests:
            hasher = xxhash.xxh3_64()
            for chunk in staged.chunks():
                hasher.update(chunk)
            self._digests[key] = hasher.hexdigest()
        return self._digests[key]

    def _counted(self, name: str, chunks: Iterator[bytes], hasher: xxhash.xxh3_64) -> Iterator[bytes]:
        """The chunks of a file; bytes that an earlier attempt has read are no progress, and are not counted again."""
        read = 0
        for chunk in chunks:
            hasher.update(chunk)
            yield chunk
            read += len(chunk)
            if (new := read - self._read.get(name, 0)) > 0:
                self._read[name] = read
                self._uploaded(new)

    def _put_bytes(self, name: str, data: bytes) -> None:
        self._objects.put(name, [data], len(data))
        self._known[name] = len(data)

    def _check_owner(self) -> None:
        try:
            mark = RunMark.read(self._objects, {RUN: 0})
        except UserError as error:  # something else overwrote the mark, and may repair it
            raise StoreFailed(str(error)) from None
        if mark is None or mark.owner != self._mark.owner:
            other = "another run" if mark is None or mark.run != self._mark.run else "another process of this run"
            raise TakenOver(f"{self._objects.url} was taken over by {other}")
