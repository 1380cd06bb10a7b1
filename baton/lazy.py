"""Lets a module import the names that it re-exports only on their first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(module: str, homes: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], Any]]:
    """The `__all__` and the `__getattr__` of a module that re-exports names. `homes`: the names by the module that
    defines them."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return sorted(home_of), get
