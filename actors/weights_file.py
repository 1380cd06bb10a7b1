"""Weights on their way into an engine: checked bytes, in a file that lives in memory.

A safetensors file is `header length (8 bytes) | header (JSON) | data`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from service.errors import WeightsGone

WeightBytes = bytes | memoryview | NDArray[np.uint8]
"""A safetensors file in memory; an array arrives through Ray's object store without a copy."""

TIED_HEAD = "lm_head.weight"
"""Some checkpoints hold it, others only the embedding that it is tied to."""

MAX_HEADER_BYTES = 100 << 20


def policy_elements(model_folder: Path) -> int:
    """How many numbers the model in a Hugging Face folder has, a tied head not counted twice."""
    total = 0
    for path in sorted(model_folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            total += _elements(file.read(length), is_tied(model_folder))
    return total


def is_tied(model_folder: Path) -> bool:
    """Whether the language model head is the embedding."""
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings", False))


def weights_in_memory(data: WeightBytes, checksum: int, elements: int, tied: bool) -> int:
    """An anonymous file in shared memory with the weights, as a descriptor; it vanishes with this process.

    Raises:
        ValueError: the bytes differ from what was sent, or are not the whole policy.
    """
    view = memoryview(data).cast("B")  # type: ignore[arg-type]  # an array is a buffer as well
    found = xxhash.xxh3_64_intdigest(view)
    if found != checksum:
        raise ValueError(f"weights of {len(view)} bytes have the checksum {found:016x}, not {checksum:016x}")
    length = int.from_bytes(view[:8], "little")
    if length > min(len(view), MAX_HEADER_BYTES):
        raise ValueError(f"weights of {len(view)} bytes are not a safetensors file")
    brought = _elements(bytes(view[8 : 8 + length]), tied)
    # vLLM would keep the old values of whatever is missing, without a word.
    if brought != elements:
        raise ValueError(f"weights have {brought} numbers, but the policy has {elements}")
    return _anonymous_file(view)


def opened(path: str) -> int:
    """A descriptor of one's own for such a file, which keeps it when the process that wrote it ends.

    Raises:
        WeightsGone: that process has ended, or is about to.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:  # which one depends on how far the process has ended
        raise WeightsGone(f"the weights at {path} are gone ({error.strerror})") from error


def _anonymous_file(view: memoryview) -> int:
    fd = os.memfd_create("baton-weights", os.MFD_CLOEXEC)
    try:
        written = 0
        while written < len(view):
            written += os.write(fd, view[written:])
    except BaseException:
        os.close(fd)
        raise
    return fd


def _elements(header: bytes, tied: bool) -> int:
    tensors = json.loads(header)
    return sum(
        math.prod(tensor["shape"])
        for name, tensor in tensors.items()
        if name != "__metadata__" and not (tied and name == TIED_HEAD)
    )
