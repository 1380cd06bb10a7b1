"""The bytes of a step group, and of a mini-batch.

    0   magic BATN, kind (u16), format version (u16), header length (u32), payload length (u64), checksum (u64)
    28  header: msgpack of a `GroupHead` or a `BatchHead`, which has the name, dtype and shape of each array
    ..  the arrays, in the header's order, each at a multiple of 64 bytes from the start

The checksum covers all bytes after it. Decoding never runs code; the arrays are read-only views of the message. A step
group with supports is sent deflated: its bytes are the header of a message of another kind, which has no arrays.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from service.columns import columns_of
from service.handoff.steps.values import Limits
from service.types import Ends, MicroBatch, MiniBatch, Refusal, RefusalReason, Sender, StepGroup, Steps

MAGIC, VERSION = b"BATN", 6
STEP_GROUP, MINI_BATCH, DEFLATED = 1, 2, 3
PREFIX = struct.Struct("<4sHHIQQ")
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20
"""Maximum bytes of a step group's header, which is mostly uids, stop reasons, notes and infos."""

_COLUMNS = {column.name: column for table in (Steps, Ends, MiniBatch, MicroBatch) for column in columns_of(table).all}
"""All columns that a message may hold, by name."""


class ArrayHead(NamedTuple):
    """Name, type and shape of an array of the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class GroupHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a step group."""

    generator: str
    incarnation: int
    sequence: int
    step_uids: tuple[str, ...]
    step_stop_reasons: tuple[str, ...]
    step_notes: tuple[str, ...]
    end_uids: tuple[str, ...]
    end_stop_reasons: tuple[str, ...]
    end_infos: tuple[str, ...]
    arrays: tuple[ArrayHead, ...]


class BatchHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a mini-batch."""

    lease: int
    groups: tuple[int, ...]
    micro_batches: tuple[int, ...]
    """Number of micro-batches of each rank."""
    metrics: dict[str, float]
    arrays: tuple[ArrayHead, ...]


class _Damaged(Exception):
    """Raised if bytes are not a valid message; `decode` turns it into a Refusal."""

    def __init__(self, reason: RefusalReason, path: str, number: float | None = None) -> None:
        self.refusal = Refusal(reason, path, number)


def encode(group: StepGroup, may_deflate: bool = True) -> bytes:
    """The bytes of a step group, deflated if it has supports; raises a ValueError if its names take more bytes than a
    header may have."""
    steps, ends = group.steps, group.ends
    arrays = _arrays_of(steps) | _arrays_of(ends)
    names = (steps.uids, steps.stop_reasons, steps.notes, ends.uids, ends.stop_reasons, ends.infos)
    head = msgspec.msgpack.encode(GroupHead(*group.sender, *names, _array_heads(arrays)))
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a step group's header takes {len(head)} bytes, MAX_HEADER_BYTES is {MAX_HEADER_BYTES}: send its "
            f"{sum(map(len, names))} uids, stop reasons, notes and infos in several messages"
        )
    message = _framed(STEP_GROUP, head, arrays)
    if steps.support_U is None or not may_deflate:
        return message
    return _framed(DEFLATED, zlib.compress(message, level=1), {})  # the default level takes four times as long


def decode(data: bytes | memoryview, limits: Limits | None) -> StepGroup | Refusal:
    """The step group in these bytes, or why they are invalid; never raises. `limits`: None if accepted before."""
    try:
        if limits is not None and len(data) > limits.max_group_bytes:
            raise _Damaged(RefusalReason.TOO_LARGE, "message", len(data))
        if len(data) >= PREFIX.size and PREFIX.unpack_from(data)[1] == DEFLATED:
            data = _inflated(data, 0 if limits is None else limits.max_group_bytes)
        return _step_group(*_opened(data, STEP_GROUP, GroupHead))
    except _Damaged as damaged:
        return damaged.refusal


def _step_group(head: GroupHead, arrays: dict[str, NDArray[Any]]) -> StepGroup:
    step_columns, end_columns = _taken(arrays, Steps), _taken(arrays, Ends)
    if step_columns["teacher_logprobs_N"] is not None:  # these values come from a scorer
        raise _Damaged(RefusalReason.SCHEMA, "teacher_logprobs_N")
    if arrays:
        raise _Damaged(RefusalReason.SCHEMA, next(iter(arrays))[:80])
    try:
        steps = Steps(uids=head.step_uids, stop_reasons=head.step_stop_reasons, notes=head.step_notes, **step_columns)
        ends = Ends(uids=head.end_uids, stop_reasons=head.end_stop_reasons, infos=head.end_infos, **end_columns)
    except ValueError as error:
        raise _Damaged(RefusalReason.LENGTH_MISMATCH, str(error)) from error
    return StepGroup(Sender(head.generator, head.incarnation, head.sequence), steps, ends)


def accepted_group(data: bytes) -> StepGroup:
    """Decode a message that the buffer had accepted; raises a ValueError if the bytes are not a step group."""
    group = decode(data, None)
    if isinstance(group, Refusal):
        raise ValueError(f"no step group: {group}")
    return group


def encode_mini_batch(batch: MiniBatch) -> bytes:
    """The bytes of a mini-batch."""
    arrays = _arrays_of(batch)
    for rank, micro_batches in enumerate(batch.ranks):
        for m, micro_batch in enumerate(micro_batches):
            arrays |= {f"{rank}/{m}/{name}": array for name, array in _arrays_of(micro_batch).items()}
    counts = tuple(len(micro_batches) for micro_batches in batch.ranks)
    head = BatchHead(batch.lease, batch.groups, counts, batch.metrics, _array_heads(arrays))
    return _framed(MINI_BATCH, msgspec.msgpack.encode(head), arrays)


def decode_mini_batch(data: bytes | memoryview) -> MiniBatch:
    """Decode a mini-batch that the buffer encoded; raises a ValueError if the bytes are not a mini-batch."""
    try:
        head, arrays = _opened(data, MINI_BATCH, BatchHead, max_header_bytes=len(data))
    except _Damaged as damaged:
        raise ValueError(f"no mini-batch: {damaged.refusal}") from damaged
    names = [column.name for column in columns_of(MicroBatch).all]
    ranks = tuple(
        tuple(MicroBatch(**{name: arrays.get(f"{rank}/{m}/{name}") for name in names}) for m in range(count))
        for rank, count in enumerate(head.micro_batches)
    )
    columns = _taken(arrays, MiniBatch)
    return MiniBatch(lease=head.lease, groups=head.groups, ranks=ranks, metrics=head.metrics, **columns)


def _arrays_of(table: object) -> dict[str, NDArray[Any]]:
    arrays = {column.name: getattr(table, column.name) for column in columns_of(type(table)).all}
    return {name: array for name, array in arrays.items() if array is not None}


def _array_heads(arrays: Mapping[str, NDArray[Any]]) -> tuple[ArrayHead, ...]:
    return tuple(ArrayHead(name, array.dtype.str, array.shape) for name, array in arrays.items())


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _framed(kind: int, head: bytes, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    parts: list[bytes | memoryview] = [head]
    position = PREFIX.size + len(head)
    for array in arrays.values():
        start = _aligned(position)
        parts += [bytes(start - position), np.ascontiguousarray(array).data.cast("B") if array.size else b""]
        position = start + array.nbytes
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    payload_bytes = position - PREFIX.size - len(head)
    prefix = PREFIX.pack(MAGIC, kind, VERSION, len(head), payload_bytes, checksum.intdigest())
    return b"".join([prefix, *parts])


def _inflated(data: bytes | memoryview, max_bytes: int) -> bytes:
    """The first `max_bytes` bytes of the step group in a deflated message; 0: all bytes."""
    try:
        return zlib.decompressobj().decompress(_header(data, DEFLATED, len(data)), max_bytes)
    except zlib.error as error:
        raise _Damaged(RefusalReason.MALFORMED, "deflated") from error


def _opened(data: bytes | memoryview, kind: int, form: type[Any], max_header_bytes: int = MAX_HEADER_BYTES) -> Any:
    """The header, and the arrays by name; checks every length before it creates any array."""
    packed = _header(data, kind, max_header_bytes)
    try:
        head = msgspec.msgpack.decode(packed, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Damaged(RefusalReason.SCHEMA, f"header: {error}"[:200]) from error
    return head, _arrays(memoryview(data), PREFIX.size + len(packed), head.arrays)


def _header(data: bytes | memoryview, kind: int, max_bytes: int) -> memoryview:
    """The header of a message of this kind that is not damaged."""
    if len(data) < PREFIX.size:
        raise _Damaged(RefusalReason.MALFORMED, "message", len(data))
    magic, found_kind, version, head_bytes, payload_bytes, checksum = PREFIX.unpack_from(data)
    if magic != MAGIC or found_kind != kind:
        raise _Damaged(RefusalReason.MALFORMED, "magic")
    if version != VERSION:
        raise _Damaged(RefusalReason.SCHEMA, "version", version)
    if PREFIX.size + head_bytes + payload_bytes != len(data) or head_bytes > max_bytes:
        raise _Damaged(RefusalReason.MALFORMED, "length", len(data))
    view = memoryview(data)
    if xxhash.xxh3_64_intdigest(view[PREFIX.size :]) != checksum:
        raise _Damaged(RefusalReason.CHECKSUM, "message")
    return view[PREFIX.size : PREFIX.size + head_bytes]


def _arrays(view: memoryview, position: int, heads: tuple[ArrayHead, ...]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype_name, shape in heads:
        column = _COLUMNS.get(name.rpartition("/")[2])
        known = () if column is None or len(shape) != column.about.ndim else (column.dtype, column.narrow)
        dtype = next((dtype for dtype in known if dtype and dtype.str == dtype_name), None)
        if dtype is None or name in arrays:
            raise _Damaged(RefusalReason.SCHEMA, name[:80])
        if min(shape) < 0 or max(shape) > len(view):  # even if another axis has length 0
            raise _Damaged(RefusalReason.MALFORMED, name[:80], min(max(shape), 1 << 62))
        count = math.prod(shape)
        start = _aligned(position)
        position = start + count * dtype.itemsize
        if position > len(view):
            raise _Damaged(RefusalReason.MALFORMED, name[:80], min(count, 1 << 62))
        array = np.frombuffer(view, dtype, count, start) if count else np.zeros(0, dtype)
        if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:  # numpy would count a byte of 2 twice
            raise _Damaged(RefusalReason.MALFORMED, name[:80])
        arrays[name] = array if len(shape) == 1 else array.reshape(shape)
    if position != len(view):
        raise _Damaged(RefusalReason.MALFORMED, "payload", len(view) - position)
    return arrays


def _taken(arrays: dict[str, NDArray[Any]], table: type) -> dict[str, Any]:
    """The columns of one table, removed from the message's arrays."""
    for column in columns_of(table).all:
        if column.name not in arrays and not column.optional:
            raise _Damaged(RefusalReason.SCHEMA, column.name)
    return {column.name: arrays.pop(column.name, None) for column in columns_of(table).all}
