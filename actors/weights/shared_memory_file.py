"""Weights as a safetensors file in shared memory, which every engine of a node can load from.

A safetensors file is `header length (8 bytes) | header (JSON) | data`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from actors.weights.checksum import PolicySize, WeightBytes, verify
from service.errors import WeightsGone


def write_shared_memory_file(data: WeightBytes, checksum: int, size: PolicySize) -> int:
    """Write weights into an anonymous file in shared memory; returns its descriptor.

    The file vanishes when the last descriptor is closed, at the latest with the processes that hold one.

    Raises:
        ValueError: the bytes differ from what was sent, or are not the whole policy.
    """
    view = verify(data, checksum)
    try:
        shapes = _shapes(view)
        size.count(shapes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"weights of {len(view)} bytes are not a safetensors file") from error
    size.check(shapes)
    fd = os.memfd_create("baton-weights", os.MFD_CLOEXEC)
    try:
        written = 0
        while written < len(view):
            written += os.write(fd, view[written:])
    except BaseException:  # the caller never gets the descriptor, which would keep all weights in memory
        os.close(fd)
        raise
    return fd


def open_shared_memory_file(path: str) -> int:
    """Open such a file by its path under /proc; the new descriptor outlives the process that wrote the file.

    Raises:
        WeightsGone: that process has ended or is about to.
    """
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:  # which one depends on how far the process has ended
        raise WeightsGone(f"the weights at {path} are gone ({error.strerror})") from error


def _shapes(view: memoryview) -> list[tuple[str, list[int]]]:
    """Names and shapes in the file's header; `ValueError` where the data do not end where the header says."""
    length = int.from_bytes(view[:8], "little")
    header: dict[str, Any] = json.loads(bytes(view[8 : 8 + length]))
    tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    if 8 + length + max((end for tensor in tensors.values() for end in tensor["data_offsets"]), default=0) != len(view):
        raise ValueError("data were cut off")
    return [(name, tensor["shape"]) for name, tensor in tensors.items()]
