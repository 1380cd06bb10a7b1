"""The fingerprint by which a step names the tokens that it extends."""

from __future__ import annotations

import numpy as np
import xxhash

from service.types import Int32s


def digest(token_ids: Int32s) -> int:
    """64-bit fingerprint of token ids.

    >>> digest(np.array([10, 20, 30, 40, 50], np.int32)) == digest(np.arange(10, 60, 10, np.int32))
    True
    """
    return int(xxhash.xxh3_64_intdigest(token_bytes(token_ids)))


def token_bytes(token_ids: Int32s) -> memoryview:
    """The token ids as little-endian int32 bytes; a view where they already lie like that in memory."""
    return np.ascontiguousarray(token_ids, "<i4").data.cast("B")
