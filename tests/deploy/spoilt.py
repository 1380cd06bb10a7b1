"""Documents with a misspelt field, one place after the other."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

Place = tuple[str | int, ...]


def mappings(value: Any, free: Collection[str], path: Place = ()) -> Iterator[Place]:
    """The paths of all mappings whose keys mean something; those under `free` are anybody's choice.

    >>> list(mappings({"a": [{"labels": {"x": 1}}]}, {"labels"}))
    [(), ('a', 0)]
    """
    if isinstance(value, dict):
        yield path
        for key, child in value.items():
            if key not in free:
                yield from mappings(child, free, (*path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from mappings(child, free, (*path, index))


def misspelt(document: Any, path: Place) -> Any:
    """A copy with a field that nothing knows in the mapping at the path."""
    wrong = place = copy.deepcopy(document)
    for key in path:
        place = place[key]
    place["misspelt"] = "x"
    return wrong
