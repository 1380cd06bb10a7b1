"""Functions of one's own that a setting names: `known_name`, or `module:name` with the module that registers it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

from service.errors import ConfigError

Registered = TypeVar("Registered")


def registered(key: str, kind: str, setting: str, known: Mapping[str, Registered]) -> Registered:
    """What is known under the name that the configuration's `key` has; its module, if it names one, is imported first.

    Raises:
        ConfigError: the module cannot be imported, or nothing is known under that name.

    >>> registered("algorithm.loss", "loss", "clip", {"clip": 0.2})
    0.2
    """
    module, _, name = setting.rpartition(":")
    if module:
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"{key}: the module {module!r} cannot be imported: {error}") from error
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
        raise ConfigError(f"{key}: no {kind} is named {name!r}{meant}")
    return known[name]
