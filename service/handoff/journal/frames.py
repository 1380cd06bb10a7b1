"""The journal's frames: their bytes, and what tells an end, a torn tail and damage apart.

A frame is a 64-byte header, the payload, and zeros up to a multiple of 64 bytes:

    magic "BTNJ" | schema | kind | position | length | synced | wall time | checksum | 16 zeros | payload | zeros

`position` is the frame's first byte counted over all segments; `synced` is how far the journal was on the disk when the
frame was written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from service.errors import UserError
from service.handoff.journal.disk import Buffer, File

MAGIC = b"BTNJ"
SCHEMA = 5
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
    """Where the frame begins."""
    end: int
    """Where the next one begins; what `Journal.append` returned."""
    synced: int
    wall: float


class Segment(NamedTuple):
    """One file of the journal."""

    start: int
    """The position of its first byte."""
    file: File
    path: Path


def frame_bytes(kind: int, payload: Buffer, position: int, synced: int, wall: float) -> tuple[Buffer, ...]:
    """A frame as buffers to write one after the other; the payload is not copied."""
    summed = _SUMMED.pack(MAGIC, SCHEMA, kind, position, len(payload), synced, wall)
    header = (summed + _CHECKSUM.pack(_checksum(summed, payload))).ljust(HEADER_BYTES, b"\0")
    padding = bytes(-len(payload) % ALIGNMENT)
    return (header, payload, padding) if padding else (header, payload)


def frames(segment: Segment, start: int | None = None) -> Iterator[Frame]:
    """The frames of a segment, from position `start` on, up to the first that cannot be read."""
    offset = 0 if start is None else start - segment.start
    size = segment.file.size()
    while (frame := _read_frame(segment, offset, size)) is not None:
        yield frame
        offset = frame.end - segment.start


def synced_later(segment: Segment, offset: int) -> int:
    """The furthest synced position that a valid frame behind `offset` states; 0 when there is none."""
    size = segment.file.size()
    furthest = 0
    for start, chunk in _data_behind(segment.file, offset):
        found = chunk.find(MAGIC)
        while found >= 0:
            if (start + found) % ALIGNMENT == 0 and (frame := _read_frame(segment, start + found, size)):
                furthest = max(furthest, frame.synced)
            found = chunk.find(MAGIC, found + 1)
    return furthest


def has_data(file: File, offset: int) -> bool:
    """Whether anything but zeros lies behind `offset`."""
    return any(True for _ in _data_behind(file, offset))


def _checksum(summed: bytes, payload: Buffer) -> int:
    checksum = xxhash.xxh3_64(summed)
    checksum.update(payload)
    return checksum.intdigest()


def _read_frame(segment: Segment, offset: int, size: int) -> Frame | None:
    """The frame at `offset`, or None where there is no whole and valid one."""
    head = segment.file.read(offset, HEADER_BYTES)
    if len(head) < HEADER_BYTES or head[:4] != MAGIC:
        return None
    _, schema, kind, position, length, synced, wall = _SUMMED.unpack_from(head)
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
            "go on with the version of Baton that began the run, or begin a new run under another run.name"
        )
    return Frame(kind, payload, position, position + HEADER_BYTES + padded, synced, wall)


def _data_behind(file: File, offset: int) -> Iterator[tuple[int, bytes]]:
    """The chunks of a file that are not all zeros; reserved space, which may be gigabytes, is skipped."""
    for first, stop in file.extents(offset):
        for start in range(first, stop, len(_ZEROS)):
            chunk = file.read(start, min(len(_ZEROS), stop - start))
            if chunk != _ZEROS[: len(chunk)]:
                yield start, chunk
