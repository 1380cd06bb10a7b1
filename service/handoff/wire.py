"""The bytes of a step group, and of a mini-batch.

    0   magic BATN, kind (u16), format version (u16), header length (u32), payload length (u64), checksum (u64)
    28  header: msgpack of a fixed structure: names, strings, and (name, dtype, shape) of each array
    ..  the arrays, in that order, each at a multiple of 64 bytes from the start

The checksum covers everything after itself. Decoding reads numbers into arrays and nothing else; the arrays are
read-only views of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from service.handoff.tables import END_COLUMNS, STEP_COLUMNS
from service.handoff.validate import Limits, table_fault
from service.types import (
    Ends,
    MicroBatch,
    MiniBatch,
    Refusal,
    RefusalReason,
    Sender,
    StepGroup,
    Steps,
)

MAGIC, VERSION = b"BATN", 1
STEP_GROUP, MINI_BATCH = 1, 2
PREFIX = struct.Struct("<4sHHIQQ")
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20

DTYPES = {
    "uid_K": "<i4", "stop_reason_K": "<i4", "ordinal_K": "<i8", "sample_K": "<i4", "attempt_K": "<i4",
    "index_K": "<i4", "temperature_K": "<f4", "reward_K": "<f8", "has_logprobs_K": "|b1", "prompt_length_K": "<i4",
    "extends_K": "<i4", "extends_length_K": "<i4", "extends_digest_K": "<u8", "offsets_K": "<i8",
    "token_ids_N": "<i4", "logprobs_N": "<f4", "loss_mask_N": "|b1", "versions_N": "<i8",
    "token_rewards_N": "<f4", "routed_experts_N": "<i2",
    "ordinal_E": "<i8", "sample_E": "<i4", "attempt_E": "<i4", "uid_E": "<i4", "n_steps_E": "<i4",
    "stop_reason_E": "<i4", "reward_E": "<f8",
}  # fmt: skip
STEP_TOKENS = ("token_ids_N", "logprobs_N", "loss_mask_N", "versions_N", "token_rewards_N", "routed_experts_N")


class ArrayHead(msgspec.Struct, frozen=True, array_like=True):
    """What an array of the payload is."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class GroupHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a step group."""

    generator: str
    epoch: int
    sequence: int
    step_uids: tuple[str, ...]
    step_stop_reasons: tuple[str, ...]
    end_uids: tuple[str, ...]
    end_stop_reasons: tuple[str, ...]
    arrays: tuple[ArrayHead, ...]


class BatchHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a mini-batch."""

    lease: int
    groups: tuple[int, ...]
    micro_batches: tuple[int, ...]
    """Per rank."""
    facts: dict[str, float]
    arrays: tuple[ArrayHead, ...]


class _Damaged(Exception):
    """Why bytes are no message; becomes a Refusal before it leaves this module."""

    def __init__(self, reason: RefusalReason, path: str, number: float | None = None) -> None:
        self.refusal = Refusal(reason, path, number)


def encode(group: StepGroup) -> bytes:
    """The bytes of a step group."""
    steps, ends = group.steps, group.ends
    arrays = {name: getattr(steps, name) for name in (*STEP_COLUMNS, "offsets_K", *STEP_TOKENS)}
    arrays |= {name: getattr(ends, name) for name in END_COLUMNS}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    names = (steps.uids, steps.stop_reasons, ends.uids, ends.stop_reasons)
    head = GroupHead(*group.sender, *names, _array_heads(arrays))
    return _framed(STEP_GROUP, msgspec.msgpack.encode(head), arrays)


def decode(data: bytes | memoryview, limits: Limits) -> StepGroup | Refusal:
    """The step group in these bytes, or why there is none; never raises."""
    try:
        if len(data) > limits.max_group_bytes:
            raise _Damaged(RefusalReason.TOO_LARGE, "message", len(data))
        head, arrays = _opened(data, STEP_GROUP, GroupHead)
        group = _group_of(head, arrays)
    except _Damaged as damaged:
        return damaged.refusal
    return table_fault(group) or group


def encode_mini_batch(batch: MiniBatch) -> bytes:
    """The bytes of a mini-batch."""
    arrays: dict[str, NDArray[Any]] = {name: getattr(batch, name) for name in _BATCH_ARRAYS}
    for rank, micro_batches in enumerate(batch.ranks):
        for m, micro_batch in enumerate(micro_batches):
            for name in _MICRO_BATCH_ARRAYS:
                if (array := getattr(micro_batch, name)) is not None:
                    arrays[f"{rank}/{m}/{name}"] = array
    counts = tuple(len(micro_batches) for micro_batches in batch.ranks)
    head = BatchHead(batch.lease, batch.groups, counts, batch.facts, _array_heads(arrays))
    return _framed(MINI_BATCH, msgspec.msgpack.encode(head), arrays)


def decode_mini_batch(data: bytes | memoryview) -> MiniBatch:
    """The mini-batch in these bytes, which the buffer made; ValueError if they are none."""
    try:
        head, arrays = _opened(data, MINI_BATCH, BatchHead, max_header_bytes=len(data))
    except _Damaged as damaged:
        raise ValueError(f"no mini-batch: {damaged.refusal}") from damaged
    ranks = tuple(
        tuple(
            MicroBatch(**{name: arrays.get(f"{rank}/{m}/{name}") for name in _MICRO_BATCH_ARRAYS}) for m in range(count)
        )
        for rank, count in enumerate(head.micro_batches)
    )
    columns = {name: arrays[name] for name in _BATCH_ARRAYS}
    return MiniBatch(lease=head.lease, groups=head.groups, ranks=ranks, facts=head.facts, **columns)


_BATCH_ARRAYS = ("advantage_G", "return_G", "loss_tokens_G", "rows_G", "prompt_of_trajectory_G")
_MICRO_BATCH_ARRAYS = (
    "token_ids_N", "offsets_R", "loss_mask_N", "logprobs_N", "staleness_N", "temperature_R",
    "trajectory_of_row_R", "routed_experts_N",
)  # fmt: skip


def _array_heads(arrays: Mapping[str, NDArray[Any]]) -> tuple[ArrayHead, ...]:
    return tuple(ArrayHead(name, array.dtype.str, array.shape) for name, array in arrays.items())


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _framed(kind: int, head: bytes, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    starts, position = [], PREFIX.size + len(head)
    for array in arrays.values():
        starts.append(_aligned(position))
        position = starts[-1] + array.nbytes
    message = bytearray(position)
    message[PREFIX.size : PREFIX.size + len(head)] = head
    view = np.frombuffer(message, np.uint8)
    for start, array in zip(starts, arrays.values(), strict=True):
        view[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    checksum = xxhash.xxh3_64_intdigest(memoryview(message)[PREFIX.size :])
    PREFIX.pack_into(message, 0, MAGIC, kind, VERSION, len(head), position - PREFIX.size - len(head), checksum)
    return bytes(message)


def _opened(data: bytes | memoryview, kind: int, form: type[Any], max_header_bytes: int = MAX_HEADER_BYTES) -> Any:
    """The header and the arrays by name; every length is checked before anything is made of it."""
    if len(data) < PREFIX.size:
        raise _Damaged(RefusalReason.MALFORMED, "message", len(data))
    magic, found_kind, version, head_bytes, payload_bytes, checksum = PREFIX.unpack_from(data)
    if magic != MAGIC or found_kind != kind:
        raise _Damaged(RefusalReason.MALFORMED, "magic")
    if version != VERSION:
        raise _Damaged(RefusalReason.SCHEMA, "version", version)
    if PREFIX.size + head_bytes + payload_bytes != len(data) or head_bytes > max_header_bytes:
        raise _Damaged(RefusalReason.MALFORMED, "length", len(data))
    view = memoryview(data)
    if xxhash.xxh3_64_intdigest(view[PREFIX.size :]) != checksum:
        raise _Damaged(RefusalReason.CHECKSUM, "message")
    try:
        head = msgspec.msgpack.decode(view[PREFIX.size : PREFIX.size + head_bytes], type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Damaged(RefusalReason.SCHEMA, f"header: {error}"[:200]) from error
    return head, _arrays(view, PREFIX.size + head_bytes, head.arrays)


def _arrays(view: memoryview, position: int, heads: tuple[ArrayHead, ...]) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for head in heads:
        if head.name in arrays or head.dtype not in _KNOWN_DTYPES or not 1 <= len(head.shape) <= 3:
            raise _Damaged(RefusalReason.SCHEMA, head.name[:80])
        count = 1
        for length in head.shape:
            count *= length if 0 <= length < 1 << 48 else len(view) + 1
        start, dtype = _aligned(position), np.dtype(head.dtype)
        if start + count * dtype.itemsize > len(view):
            raise _Damaged(RefusalReason.MALFORMED, head.name[:80], count)
        arrays[head.name] = np.frombuffer(view, dtype, count, min(start, len(view))).reshape(head.shape)
        position = start + count * dtype.itemsize
    if position != len(view):
        raise _Damaged(RefusalReason.MALFORMED, "payload", len(view) - position)
    return arrays


_KNOWN_DTYPES = frozenset((*DTYPES.values(), "<f4", "<f8", "<i4", "<i8", "|b1"))


def _group_of(head: GroupHead, arrays: dict[str, NDArray[Any]]) -> StepGroup:
    optional = {"token_rewards_N", "routed_experts_N"}
    for name, dtype in DTYPES.items():
        array = arrays.get(name)
        if array is None:
            if name not in optional:
                raise _Damaged(RefusalReason.SCHEMA, name)
        elif array.dtype.str != dtype or array.ndim != (3 if name == "routed_experts_N" else 1):
            raise _Damaged(RefusalReason.SCHEMA, name)
    if len(arrays) > len(DTYPES) or any(name not in DTYPES for name in arrays):
        raise _Damaged(RefusalReason.SCHEMA, "arrays", len(arrays))
    step_columns = {name: arrays.get(name) for name in DTYPES if name not in END_COLUMNS}
    steps = Steps(uids=head.step_uids, stop_reasons=head.step_stop_reasons, **step_columns)  # type: ignore[arg-type]
    ends = Ends(head.end_uids, head.end_stop_reasons, **{name: arrays[name] for name in END_COLUMNS})
    return StepGroup(Sender(head.generator, head.epoch, head.sequence), steps, ends)
