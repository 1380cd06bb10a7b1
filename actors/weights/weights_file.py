"""Weights on their way into an engine: checked bytes, in a file that lives in memory.

A safetensors file is `header length (8 bytes) | header (JSON) | data`.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from service.errors import WeightsGone

WeightBytes = bytes | memoryview | NDArray[np.uint8]
"""A safetensors file in memory; an array arrives through Ray's object store without a copy."""

TIED_HEAD = "lm_head.weight"
"""Some checkpoints hold it, others only the embedding that it is tied to."""

METADATA = "__metadata__"
"""Stands among a header's tensors and is none."""


def policy_elements(model_folder: Path) -> int:
    """How many numbers the model in a Hugging Face folder has, a tied head not counted twice."""
    total = 0
    for path in sorted(model_folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            total += _elements(json.loads(file.read(length)), is_tied(model_folder))
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
    try:
        brought = _elements(_whole_header(view), tied)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"weights of {len(view)} bytes are not a safetensors file") from error
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
        return os.open(path, os.O_RDONLY)
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


def _whole_header(view: memoryview) -> dict[str, Any]:
    """What the file says of each tensor, if its data end where it says."""
    length = int.from_bytes(view[:8], "little")
    tensors: dict[str, Any] = json.loads(bytes(view[8 : 8 + length]))
    ends = [end for name, tensor in tensors.items() if name != METADATA for end in tensor["data_offsets"]]
    if 8 + length + max(ends, default=0) != len(view):
        raise ValueError("data were cut off")
    return tensors


def _elements(tensors: dict[str, Any], tied: bool) -> int:
    return sum(
        math.prod(tensor["shape"])
        for name, tensor in tensors.items()
        if name != METADATA and not (tied and name == TIED_HEAD)
    )
