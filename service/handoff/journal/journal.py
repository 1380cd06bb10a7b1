"""The append-only journal: synced frames survive kill -9 of every process.

A frame is a 64-byte header, the payload, and zeros up to a multiple of 64 bytes:

    magic "BTNJ" | schema | kind | position | length | synced | wall time | checksum | 16 zeros | payload | zeros

`position` is the offset of the frame's first byte, counted over all segments. `synced` is the position up to which the
journal was on the disk when the frame was written. A segment is a file, named by the position of its first byte. Each
segment but the first begins with a snapshot, so that older segments can be removed.

Only the last segment can have a torn tail, which is cut off. The tail begins at an unreadable frame, if no later valid
frame records that this frame was synced. Every other frame was synced before a later segment began, or before earlier
segments were removed. If such a frame cannot be read, the journal refuses to start and changes nothing.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from service.clock import Clock
from service.errors import JournalError, UserError
from service.handoff.journal.disk import Buffer, Disk, File

MAGIC = b"BTNJ"
SCHEMA = 7
"""The version of the journal's format: of its frames, its events and its snapshots."""
ALIGNMENT = 64
HEADER_BYTES = 64
_SUMMED = struct.Struct("<4sHHQQQd")
_CHECKSUM = struct.Struct("<Q")
_ZEROS = bytes(1 << 20)


class Frame(NamedTuple):
    """One record of the journal."""

    kind: int
    payload: bytes
    position: int
    end: int
    """The position at which the next frame begins; `Journal.append` returned this position."""
    synced: int


class Segment(NamedTuple):
    """One file of the journal."""

    start: int
    file: File
    path: Path


def frames(segment: Segment, start: int | None = None) -> Iterator[Frame]:
    """Yield the frames of a segment, from position `start` on, up to the first frame that cannot be read."""
    offset = 0 if start is None else start - segment.start
    size = segment.file.size()
    while (frame := _read_frame(segment, offset, size)) is not None:
        yield frame
        offset = frame.end - segment.start


def first_frame(path: Path) -> Frame | None:
    """The first frame of a segment's file; None if it is damaged. Raises a JournalError if there is no such file."""
    try:
        return next(frames(Segment(int(path.stem), File(path), path)), None)
    except OSError as error:  # the kernel's error names no file
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error


def synced_later(segment: Segment, offset: int) -> int:
    """The highest position that a valid frame after `offset` records as synced; 0 if there is no valid frame."""
    size = segment.file.size()
    furthest = 0
    for start, chunk in _data_behind(segment.file, offset):
        found = chunk.find(MAGIC)
        while found >= 0:
            if (start + found) % ALIGNMENT == 0 and (frame := _read_frame(segment, start + found, size)):
                furthest = max(furthest, frame.synced)
            found = chunk.find(MAGIC, found + 1)
    return furthest


def _damaged(segment: Segment, position: int) -> JournalError:
    return JournalError(
        f"{segment.path}: damaged at byte {position - segment.start} (position {position}); refusing to start. Bring "
        "the file back from a copy, or begin a new run"
    )


def _checksum(summed: bytes, payload: Buffer) -> int:
    checksum = xxhash.xxh3_64(summed)
    checksum.update(payload)
    return checksum.intdigest()


def _read_frame(segment: Segment, offset: int, size: int) -> Frame | None:
    head = segment.file.read(offset, HEADER_BYTES)
    if len(head) < HEADER_BYTES or head[:4] != MAGIC:
        return None
    _, schema, kind, position, length, synced, _ = _SUMMED.unpack_from(head)
    padded = length + -length % ALIGNMENT
    if position != segment.start + offset or offset + HEADER_BYTES + padded > size:
        return None
    body = segment.file.read(offset + HEADER_BYTES, padded)
    payload, padding = body[:length], body[length:]
    (checksum,) = _CHECKSUM.unpack_from(head, _SUMMED.size)
    clean = not any(head[_SUMMED.size + _CHECKSUM.size :]) and not any(padding) and len(body) == padded
    if not clean or checksum != _checksum(head[: _SUMMED.size], payload):
        return None
    if schema != SCHEMA:
        raise UserError(
            f"{segment.path}: the journal's format has version {schema}, this version of Baton reads version {SCHEMA}: "
            "continue with the version of Baton that began the run, or begin a new run under another run.name"
        )
    return Frame(kind, payload, position, position + HEADER_BYTES + padded, synced)


def _data_behind(file: File, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, chunk) of the file's nonzero data; skips reserved space, which may be gigabytes."""
    for first, stop in file.extents(offset):
        for start in range(first, stop, len(_ZEROS)):
            chunk = file.read(start, min(len(_ZEROS), stop - start))
            if chunk != _ZEROS[: len(chunk)]:
                yield start, chunk


ALLOCATION_BYTES = 1 << 20
PAGE_BYTES = 1 << 12
FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


class _Queued(NamedTuple):
    """A frame that is not on the disk yet; its bytes are built when it is written."""

    kind: int
    payload: Buffer
    position: int
    end: int
    wall: float
    begins_segment: bool


class Journal:
    """Frames on disk: one thread calls `append`, which queues a frame; `sync`, in any thread, makes frames durable."""

    def __init__(self, folder: Path, clock: Clock, disk: Disk | None = None, segment_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self.synced = 0
        """Everything before this position is on the disk."""
        self.position = 0
        """The position of the next frame."""
        self.stalled: str | None = None
        """Why the last sync left frames in the queue; None if it wrote all frames."""
        self.segment_bytes = segment_bytes
        """Bytes after which a segment is full."""
        self._clock = clock
        self._disk: Disk = disk or Disk()
        self._segment_position = 0
        """End of the last segment's snapshot. `segment_bytes` counts from here, because a snapshot may be long."""
        self.reclaims: list[tuple[int, int]] = []
        """Calls of `reclaim` that `sync` has not carried out yet, as (`once`, `below`)."""
        self._queue: list[_Queued] = []
        self._queue_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._segments_lock = threading.Lock()
        self._segments: list[Segment] = []
        self._allocated = 0
        """Bytes of the last segment that are reserved on the disk."""
        self._ready = False

    @property
    def start(self) -> int:
        """Position of the oldest frame that is kept."""
        return self._segments[0].start

    @property
    def ends(self) -> list[int]:
        """End positions of the segments that are completely on the disk, oldest first."""
        ends = [*(segment.start for segment in self._segments[1:]), self.position]
        return [end for end in ends if end <= self.synced]

    @property
    def segment_is_full(self) -> bool:
        """Whether the next frame should begin a new segment."""
        return self.position - self._segment_position >= self.segment_bytes

    def append(self, kind: int, payload: Buffer, begins_segment: bool = False) -> int:
        """Queue a frame; returns the position of its end: the frame may be acknowledged once `synced` is as high."""
        if not self._ready:
            raise ValueError("the journal takes frames only after its replay")
        end = self.position + HEADER_BYTES + len(payload) + -len(payload) % ALIGNMENT
        if begins_segment:
            self._segment_position = end
        with self._queue_lock:
            self._queue.append(_Queued(kind, payload, self.position, end, self._clock.wall(), begins_segment))
            self.position = end
        return end

    def sync(self) -> int:
        """Make all queued frames durable, or keep them queued if the disk is full; returns `synced`."""
        with self._sync_lock:
            with self._queue_lock:
                batch, self._queue = self._queue, []
            while batch:
                cut = next((i for i, queued in enumerate(batch) if i and queued.begins_segment), len(batch))
                if not self._write(batch[:cut]):
                    with self._queue_lock:
                        self._queue = batch + self._queue
                    break
                batch = batch[cut:]
            self._remove_unneeded()
            return self.synced

    def reserve(self, n_bytes: int) -> bool:
        """Reserve space on the disk for `n_bytes` more bytes; returns False if the disk is too full."""
        with self._segments_lock:
            active = self._segments[-1]
            wanted = self.position - active.start + n_bytes
            if wanted <= self._allocated:
                return True
            rounded = -(-wanted // ALLOCATION_BYTES) * ALLOCATION_BYTES
            for size in (rounded, wanted):
                try:
                    if _allocated(active.file, size):
                        self._allocated = size
                        return True
                except OSError as error:
                    raise JournalError(f"{active.path}: cannot allocate {size} bytes: {error}") from error
            return False

    def reclaim(self, below: int, once: int) -> None:
        """Mark segments before position `below`: `sync` removes them once frames up to position `once` are synced."""
        with self._queue_lock:
            self.reclaims.append((once, below))

    def replay(self) -> Iterator[Frame]:
        """Yield all frames, oldest first, and cut off a torn tail; then `append` may be called."""
        self._open_segments()
        self.position = self.start
        for segment, following in zip(self._segments, [*self._segments[1:], None], strict=True):
            for frame in frames(segment):
                self.position = frame.end
                if frame.position == segment.start > 0:
                    self._segment_position = frame.end
                yield frame
            if following is not None:
                self._check_end(segment, following)
            else:
                self._cut_tail(segment)
        self.synced = self.position
        self._ready = True

    def read(self, start: int, stop: int | None = None) -> Iterator[Frame]:
        """Yield the synced frames from position `start`, where a frame must begin, to `stop`."""
        stop = self.synced if stop is None else min(stop, self.synced)
        for segment, following in zip(self._segments, [*self._segments[1:], None], strict=True):
            if following is None or start < following.start:
                for frame in frames(segment, max(start, segment.start)):
                    if frame.end > stop:
                        return
                    yield frame

    def close(self) -> None:
        """Free unused reserved space and close the files; unsynced frames are lost."""
        if self._ready:
            self._segments[-1].file.truncate(self.synced - self._segments[-1].start)
        for segment in self._segments:
            segment.file.close()
        self._segments, self._ready = [], False

    def _open_segments(self) -> None:
        names = [name for name in self._disk.names(self.folder) if name.endswith(".journal")]
        for name in names or [segment_name(0)]:
            path = self.folder / name
            if not path.stem.isdecimal():
                raise JournalError(f"{path}: a segment's name is the position of its first byte; move the file away")
            try:
                self._segments.append(Segment(int(path.stem), self._disk.open(path), path))
            except OSError as error:
                raise JournalError(f"{path}: cannot open this segment: {error.strerror or error}") from error

    def _check_end(self, segment: Segment, following: Segment) -> None:
        offset = self.position - segment.start
        if any(_data_behind(segment.file, offset)):
            raise _damaged(segment, self.position)
        if self.position == following.start:
            segment.file.truncate(offset)
            return
        raise JournalError(
            f"{following.path}: begins at {following.start}, expected {self.position}; a file is missing, or the end "
            f"of {segment.path.name} is; refusing to start"
        )

    def _cut_tail(self, segment: Segment) -> None:
        """Distinguish a clean end, a torn tail and damage of the last segment; cut a torn tail."""
        offset, size = self.position - segment.start, segment.file.size()
        # The oldest segment began with a synced snapshot: only then were the segments before it removed.
        if offset == 0 and segment.start == self.start > 0:
            raise _damaged(segment, self.position)
        if offset < size and any(_data_behind(segment.file, offset)):
            if synced_later(segment, offset) > self.position:
                raise _damaged(segment, self.position)
            log.warning("%s: cut a torn tail of %d bytes at byte %d", segment.path, size - offset, offset)
            segment.file.truncate(offset)
        self._allocated = size
        if not _allocated(segment.file, size):
            segment.file.truncate(offset)
            self._allocated = offset

    def _write(self, batch: list[_Queued]) -> bool:
        if batch[0].begins_segment:
            self._begin_segment(batch[0].position)
        active = self._segments[-1]
        offset = self.synced - active.start
        buffers: list[Buffer] = []  # payloads are not copied
        for kind, payload, position, _, wall, _ in batch:
            summed = _SUMMED.pack(MAGIC, SCHEMA, kind, position, len(payload), self.synced, wall)
            header = (summed + _CHECKSUM.pack(_checksum(summed, payload))).ljust(HEADER_BYTES, b"\0")
            buffers += [header, payload]
            if padding := -len(payload) % ALIGNMENT:
                buffers.append(bytes(padding))
        try:
            written = active.file.write(offset, buffers)
        except OSError as error:
            if error.errno not in FULL:
                raise JournalError(f"{active.path}: cannot write at byte {offset}: {error}") from error
            written = 0
        if written < batch[-1].end - self.synced:
            # The next sync writes the same bytes to the same place, so a partial write does no harm.
            self.stalled = f"the disk of {self.folder} is full, {batch[-1].end - self.synced} bytes are not written"
            return False
        try:
            active.file.sync()
        except OSError as error:
            raise JournalError(f"{active.path}: cannot sync: {error}; nothing after byte {offset} is safe") from error
        self.synced, self.stalled = batch[-1].end, None
        return True

    def _begin_segment(self, start: int) -> None:
        with self._segments_lock:
            active = self._segments[-1]
            if active.start == start:
                return
            path = self.folder / segment_name(start)
            file = self._disk.open(path)
            try:
                reserved = _move_reserve(active.file, start - active.start, file, self._allocated)
            except OSError as error:
                file.close()
                raise JournalError(f"{path}: cannot begin a segment: {error}") from error
            self._segments.append(Segment(start, file, path))
            self._allocated = reserved

    def _remove_unneeded(self) -> None:
        with self._queue_lock:
            unneeded_below = max((below for once, below in self.reclaims if once <= self.synced), default=0)
        while len(self._segments) > 1 and self._segments[1].start <= unneeded_below:
            with self._segments_lock:
                oldest = self._segments.pop(0)
            oldest.file.close()
            self._disk.remove(oldest.path)
        with self._queue_lock:
            self.reclaims = [(once, below) for once, below in self.reclaims if once > self.synced]


def _move_reserve(old: File, used: int, new: File, allocated: int) -> int:
    """Move a file's unused reserved space to a new file; returns the size of the new file. A full disk has to free the
    space first, so another process may take some of it."""
    wanted = max(allocated - used, 0)
    size, more = (wanted, 0) if _allocated(new, wanted) else (0, wanted)
    old.truncate(used)
    while more >= PAGE_BYTES:
        if _allocated(new, size + more):
            size += more
        more //= 2
    return size


def _allocated(file: File, size: int) -> bool:
    try:
        if size:
            file.allocate(size)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return False
    return True


def segment_name(start: int) -> str:
    """The name of the file of the segment that begins at position `start`."""
    return f"{start:020d}.journal"
