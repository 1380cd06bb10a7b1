"""What an environment says of a trajectory (`info`), as a JSON text in the end record, and its means over a mini-batch.

{"search_r1": {"searches": 2}}  {"search_r1": {"searches": 1}}   ->   environment/search_r1/searches 1.5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

import msgspec

from service.types import Ends

MAX_INFO_NAMES = 64
"""Maximum number of names of an environment whose means are kept, so that new names take bounded memory."""

MAX_INFO_BYTES = 1000
"""Maximum bytes of an info."""

_texts = msgspec.json.Decoder(dict[str, dict[str, float | None]])


def packed_info(environment: str, info: Mapping[str, float]) -> str:
    """The text of a trajectory's `info`, with six digits, and null for numbers that are not finite; without those from
    which on it would exceed `MAX_INFO_BYTES`."""
    kept = {name: float(f"{number:.6g}") for name, number in islice(info.items(), MAX_INFO_NAMES)}
    while len(text := msgspec.json.encode({environment: kept})) > MAX_INFO_BYTES:
        if not kept:
            return ""
        kept.popitem()
    return text.decode()


def is_info(text: str) -> bool:
    """Whether a text is one that `packed_info` may have made."""
    try:
        return not text or bool(_texts.decode(text))
    except msgspec.MsgspecError:
        return False


def info_means(ends: Ends) -> dict[str, float]:
    """The means over the trajectories of each environment, named `environment/<environment>/<name>`. A trajectory whose
    `info` lacks the name counts as 0; one whose number is not finite does not count."""
    count, sums = Counter[str](), dict[str, Counter[str]]()
    uncounted = Counter[tuple[str, str]]()
    for code, times in Counter(ends.info_E.tolist()).items():
        for environment, info in _texts.decode(ends.infos[code] or "{}").items():
            count[environment] += times
            of = sums.setdefault(environment, Counter())
            for name, number in info.items():
                if number is None:
                    uncounted[environment, name] += times
                elif name in of or len(of) < MAX_INFO_NAMES:
                    of[name] += times * number  # type: ignore[assignment]
    return {
        f"environment/{environment}/{name}": total / (count[environment] - uncounted[environment, name])
        for environment, of in sums.items()
        for name, total in of.items()
    }
