"""Which keys of a line of `metrics.jsonl` have a meaning."""

import re
from collections.abc import Iterable

from service.observe.metrics_table import STEP_KEYS, TABLE

_NAME = re.compile(r"<\w+>")
_MEANT = {*STEP_KEYS, *(metric.key for metric in TABLE if metric.key)}
_KEYS = re.compile("|".join(".+".join(map(re.escape, _NAME.split(key))) for key in _MEANT))


def without_meaning(keys: Iterable[str]) -> list[str]:
    """The keys to add to `service.observe.metrics_table`, or to the metrics' table."""
    return [key for key in keys if not _KEYS.fullmatch(key)]
