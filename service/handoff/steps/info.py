"""An environment's numbers about a trajectory (`info`), as a JSON text in the end record, such as

{"search_r1": {"searches": 2}}
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

import msgspec

MAX_INFO_NAMES = 64
"""Maximum number of names of an environment whose means are kept, so that new names take bounded memory."""

MAX_INFO_BYTES = 1000
"""Maximum bytes of an info."""

INFOS = msgspec.json.Decoder(dict[str, dict[str, float | None]])
"""Reads the text: the numbers by environment and name."""


def packed_info(environment: str, info: Mapping[str, float]) -> str:
    """The text of a trajectory's `info`: numbers have six digits, or null if they are not finite. The last numbers are
    left out if the text would exceed `MAX_INFO_BYTES`."""
    kept = {name: float(f"{number:.6g}") for name, number in islice(info.items(), MAX_INFO_NAMES)}
    while len(text := msgspec.json.encode({environment: kept})) > MAX_INFO_BYTES:
        if not kept:
            return ""
        kept.popitem()
    return text.decode()


def is_info(text: str) -> bool:
    """Whether `packed_info` may have made this text."""
    try:
        return not text or bool(INFOS.decode(text))
    except msgspec.MsgspecError:
        return False
