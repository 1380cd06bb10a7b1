"""Buckets: bytes of a part that are sent as one message, whole or as the elements that differ from the last file.

    base       1.0  2.0  3.0  4.0  5.0  6.0       elements of 2 bytes
    new        1.0  2.5  3.0  4.0  5.0  6.5
    message    2.5  6.5 | 1  3                    values, then the unchanged elements before each of them

A gap of 255 or more elements is written as bytes of 255 and the remainder, so a changed element usually takes its
value and one byte. Each message has the checksum of its base, so that no other base is changed, and the checksum
of its result.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.weights.policy_tensors import WeightBytes, checksum_of, verify

MAX_CHANGED = 0.15
"""Fraction of changed elements above which a bucket is sent whole."""
SKIP = 255
"""A byte of a gap that continues in the next byte."""

Octets = NDArray[np.uint8]


class WeightBucket(NamedTuple):
    """Describes a bucket: which bytes of a rank's part of a weights file it holds."""

    version: int
    """Packed version of the file."""
    rank: int
    """The rank that holds the part."""
    start: int
    """First byte in the part."""
    n_bytes: int
    checksum: int
    message_bytes: int
    """Bytes of the message."""
    base: int | None = None
    """Checksum of the bytes that the message changes; None: the message is the bytes themselves."""
    changed: int | None = None
    """Elements that differ from the file before; None: there is no such file."""
    itemsize: int = 1
    """Bytes of an element."""


def encode(bucket: WeightBucket, base: Octets, new: Octets, whole: bool) -> tuple[WeightBucket, Octets]:
    """Encode the bucket's message, where `bucket.base` is the checksum of `base`; with `whole` the bucket is
    always sent whole."""
    element = np.dtype(f"u{bucket.itemsize}")
    places = np.flatnonzero(base.view(element) != new.view(element))
    bucket = bucket._replace(changed=len(places))
    if whole or len(places) * bucket.itemsize > MAX_CHANGED * bucket.n_bytes:
        return bucket._replace(base=None), new
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum(gaps // SKIP + 1)
    octets = np.full(ends[-1] if len(ends) else 0, SKIP, np.uint8)
    octets[ends - 1] = gaps % SKIP
    message = np.concatenate([new.view(element)[places].view(np.uint8), octets])
    return bucket._replace(message_bytes=len(message)), message


def decode(bucket: WeightBucket, message: WeightBytes, base: bytearray) -> memoryview:
    """Return the bucket's bytes, made from the base bytes that the message changes; the base is overwritten.

    Raises:
        ValueError: the result differs from the sent bytes.
    """
    if bucket.base is None:
        return verify(message, bucket.checksum)
    element = np.dtype(f"u{bucket.itemsize}")
    octets = np.frombuffer(message, np.uint8)
    values, gaps = np.split(octets, [(bucket.changed or 0) * bucket.itemsize])
    places = np.cumsum(gaps + (gaps != SKIP), dtype=np.int64)[gaps != SKIP] - 1
    elements = np.frombuffer(base, element)
    if len(values) != len(places) * bucket.itemsize or (len(places) and places[-1] >= len(elements)):
        raise ValueError(f"a change of weights names other elements than the {len(elements)} of its bucket")
    elements[places] = values.view(element)
    return verify(base, bucket.checksum)


def bucket_of(version: int, rank: int, start: int, new: Octets) -> WeightBucket:
    """Return the bucket for these bytes of a rank's part of a version's file."""
    return WeightBucket(version, rank, start, len(new), checksum_of(new), len(new))
