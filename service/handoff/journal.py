"""The append-only journal: what it acknowledged survives kill -9 of everything.

A frame is a 64-byte header, the payload, and zeros up to a multiple of 64 bytes:

    magic "BTNJ" | schema | kind | position | length | synced | wall time | checksum | 16 zeros | payload | zeros

`position` is the frame's first byte counted over all segments, so a frame knows its place; `synced` is how far the
journal was on the disk when the frame was queued. A frame that cannot be read is a torn tail when nothing valid behind
it says that it had been synced (the tail is cut), and damage otherwise (the journal refuses to start).
Segments are files named by the position of their first byte.
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
from service.errors import JournalError
from service.handoff.disk import Buffer, Disk, File, LocalDisk

MAGIC = b"BTNJ"
SCHEMA = 1
ALIGNMENT = 64
_SUMMED = struct.Struct("<4sHHQQQd")
_CHECKSUM = struct.Struct("<Q")
_HEADER_BYTES = 64
_ZEROS = bytes(1 << 20)
_ALLOCATION_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger(__name__)


class Frame(NamedTuple):
    """One record of the journal."""

    kind: int
    payload: bytes
    position: int
    """Where the frame begins."""
    end: int
    """Where the next one begins; what `Journal.append` returned."""
    synced: int
    wall: float


class _Queued(NamedTuple):
    end: int
    buffers: tuple[Buffer, ...]


class _Segment(NamedTuple):
    start: int
    file: File
    path: Path


class Journal:
    """Frames on disk; `append` queues, `sync` makes everything queued durable with one fdatasync.

    `append` belongs to one thread; `sync` may run in another.
    """

    def __init__(self, folder: Path, clock: Clock, disk: Disk | None = None, segment_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self.synced = 0
        """Everything before this position is on the disk."""
        self.position = 0
        """Where the next frame goes."""
        self.stalled: str | None = None
        """Why the last sync left frames in the queue; None when it left none."""
        self._clock = clock
        self._disk: Disk = disk or LocalDisk()
        self._segment_bytes = segment_bytes
        self._queue: list[_Queued] = []
        self._queue_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._active_lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._allocated = 0
        self._ready = False

    def append(self, kind: int, payload: Buffer) -> int:
        """Queue a frame; returns the position that `synced` has to reach before anyone may rely on it."""
        if not self._ready:
            raise ValueError("the journal takes frames only after its replay")
        header = _header(kind, payload, self.position, self.synced, self._clock.wall())
        padding = bytes(-len(payload) % ALIGNMENT)
        end = self.position + _HEADER_BYTES + len(payload) + len(padding)
        with self._queue_lock:
            self._queue.append(_Queued(end, (header, payload, padding) if padding else (header, payload)))
            self.position = end
        return end

    def sync(self) -> int:
        """Make everything queued durable; returns `synced`. On a full disk the frames stay queued, in order."""
        with self._sync_lock:
            with self._queue_lock:
                batch, self._queue = self._queue, []
            if batch and not self._write(batch):
                with self._queue_lock:
                    self._queue = batch + self._queue
            return self.synced

    def reserve(self, n_bytes: int) -> bool:
        """Whether `n_bytes` more have their place on the disk, so that writing them cannot run out of space."""
        with self._active_lock:
            active = self._segments[-1]
            wanted = self.position - active.start + n_bytes
            if wanted <= self._allocated:
                return True
            rounded = -(-wanted // _ALLOCATION_BYTES) * _ALLOCATION_BYTES
            for size in (rounded, wanted):
                try:
                    active.file.allocate(size)
                except OSError as error:
                    if error.errno not in FULL:
                        raise JournalError(f"{active.path}: cannot allocate {size} bytes: {error}") from error
                else:
                    self._allocated = size
                    return True
            return False

    def replay(self) -> Iterator[Frame]:
        """All frames so far, oldest first; cuts a torn tail; the journal takes new frames when this is exhausted."""
        self._open_segments()
        for index, segment in enumerate(self._segments):
            if segment.start != self.position and index > 0:
                raise JournalError(
                    f"{segment.path}: begins at {segment.start}, expected {self.position}; a file is missing"
                )
            self.position = segment.start
            for frame in _frames(segment):
                self.position = frame.end
                yield frame
            self._end_of(segment, is_last=index == len(self._segments) - 1)
        self.synced = self.position
        self._ready = True

    def read(self, start: int) -> Iterator[Frame]:
        """The synced frames from position `start` on, which is a frame's beginning."""
        for segment, following in zip(self._segments, [*self._segments[1:], None], strict=True):
            if following is None or start < following.start:
                for frame in _frames(segment, max(start, segment.start)):
                    if frame.end > self.synced:
                        return
                    yield frame

    def close(self) -> None:
        """Give unused space back and close the files; what was queued and never synced is lost."""
        if self._ready:
            self._segments[-1].file.truncate(self.synced - self._segments[-1].start)
        for segment in self._segments:
            segment.file.close()
        self._segments, self._ready = [], False

    def _open_segments(self) -> None:
        names = [name for name in self._disk.names(self.folder) if name.endswith(".journal")]
        for name in names or [_segment_name(0)]:
            path = self.folder / name
            self._segments.append(_Segment(int(path.stem), self._disk.open(path), path))

    def _end_of(self, segment: _Segment, is_last: bool) -> None:
        """Tell an end, a torn tail and damage apart where no further frame of the segment can be read."""
        offset = self.position - segment.start
        size = segment.file.size()
        if offset < size and (not is_last or _synced_later(segment, offset) > self.position):
            raise JournalError(
                f"{segment.path}: damaged at byte {offset} (position {self.position}); refusing to start"
            )
        if is_last and offset < size:
            if any(_data_behind(segment.file, offset)):
                log.warning("%s: cut a torn tail of %d bytes at byte %d", segment.path, size - offset, offset)
            segment.file.truncate(offset)
        self._allocated = offset

    def _write(self, batch: list[_Queued]) -> bool:
        self._rotate_when_full()
        active = self._segments[-1]
        offset = self.synced - active.start
        buffers = [buffer for queued in batch for buffer in queued.buffers]
        try:
            written = active.file.write(offset, buffers)
        except OSError as error:
            if error.errno not in FULL:
                raise JournalError(f"{active.path}: cannot write at byte {offset}: {error}") from error
            written = 0
        if written < batch[-1].end - self.synced:
            # The next sync writes the same bytes to the same place, so a part that was written does no harm.
            self.stalled = f"the disk of {self.folder} is full"
            return False
        try:
            active.file.sync()
        except OSError as error:
            raise JournalError(f"{active.path}: cannot sync: {error}; nothing after byte {offset} is safe") from error
        self.synced, self.stalled = batch[-1].end, None
        return True

    def _rotate_when_full(self) -> None:
        active = self._segments[-1]
        if self.synced - active.start < self._segment_bytes:
            return
        with self._active_lock:
            path = self.folder / _segment_name(self.synced)
            try:
                file = self._disk.open(path)
                still_reserved = max(self._allocated - (self.synced - active.start), 0)
                file.allocate(max(still_reserved, 1))
            except OSError as error:
                if error.errno not in FULL:
                    raise JournalError(f"{path}: cannot begin a segment: {error}") from error
                self._disk.remove(path)
                return
            active.file.truncate(self.synced - active.start)
            self._segments.append(_Segment(self.synced, file, path))
            self._allocated = still_reserved


def _segment_name(start: int) -> str:
    return f"{start:020d}.journal"


def _header(kind: int, payload: Buffer, position: int, synced: int, wall: float) -> bytes:
    summed = _SUMMED.pack(MAGIC, SCHEMA, kind, position, len(payload), synced, wall)
    return (summed + _CHECKSUM.pack(_checksum(summed, payload))).ljust(_HEADER_BYTES, b"\0")


def _checksum(summed: bytes, payload: Buffer) -> int:
    checksum = xxhash.xxh3_64(summed)
    checksum.update(payload)
    return checksum.intdigest()


def _frames(segment: _Segment, start: int | None = None) -> Iterator[Frame]:
    """Frames of one segment up to the first that cannot be read."""
    offset = 0 if start is None else start - segment.start
    size = segment.file.size()
    while (frame := _read_frame(segment, offset, size)) is not None:
        yield frame
        offset = frame.end - segment.start


def _read_frame(segment: _Segment, offset: int, size: int) -> Frame | None:
    """The frame at `offset`, or None where there is no whole and valid one."""
    head = segment.file.read(offset, _HEADER_BYTES)
    if len(head) < _HEADER_BYTES or head[:4] != MAGIC:
        return None
    _, schema, kind, position, length, synced, wall = _SUMMED.unpack_from(head)
    if schema > SCHEMA and position == segment.start + offset:
        raise JournalError(f"{segment.path}: byte {offset} has schema {schema}; this version reads up to {SCHEMA}")
    padded = length + -length % ALIGNMENT
    if position != segment.start + offset or offset + _HEADER_BYTES + padded > size:
        return None
    body = segment.file.read(offset + _HEADER_BYTES, padded)
    payload, padding = body[:length], body[length:]
    (checksum,) = _CHECKSUM.unpack_from(head, _SUMMED.size)
    clean = not any(head[_SUMMED.size + _CHECKSUM.size :]) and not any(padding) and len(body) == padded
    if not clean or checksum != _checksum(head[: _SUMMED.size], payload):
        return None
    return Frame(kind, payload, position, position + _HEADER_BYTES + padded, synced, wall)


def _synced_later(segment: _Segment, offset: int) -> int:
    """The furthest synced position that a valid frame behind `offset` vouches for; 0 when there is none."""
    size = segment.file.size()
    furthest = 0
    for start, chunk in _data_behind(segment.file, offset):
        found = chunk.find(MAGIC)
        while found >= 0:
            if (start + found) % ALIGNMENT == 0 and (frame := _read_frame(segment, start + found, size)):
                furthest = max(furthest, frame.synced)
            found = chunk.find(MAGIC, found + 1)
    return furthest


def _data_behind(file: File, offset: int) -> Iterator[tuple[int, bytes]]:
    """The chunks of a file that are not all zeros; reserved space, which may be gigabytes, is skipped."""
    for first, stop in file.extents(offset):
        for start in range(first, stop, len(_ZEROS)):
            chunk = file.read(start, min(len(_ZEROS), stop - start))
            if chunk != _ZEROS[: len(chunk)]:
                yield start, chunk
