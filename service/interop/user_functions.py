"""Functions that a setting names: built-in ones by name, a user's own as `module:name`, which the module registers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TypeVar

from service.errors import ConfigError

Registered = TypeVar("Registered")


def malformed_name(kind: str, setting: str, built_in: Sequence[str]) -> str | None:
    """What is wrong with a setting as far as can be said without importing a module; None: nothing.

    >>> malformed_name("loss", "ppo_clop", ["ppo_clip"])
    "there is no loss 'ppo_clop'; did you mean ppo_clip? One that your own module registers is named your.module:name"
    """
    module, _, name = setting.rpartition(":")
    if module:
        is_whole = name and all(part.isidentifier() for part in module.split("."))
        return None if is_whole else f"{setting!r} is no module:name, so nothing could be imported"
    if setting in built_in:
        return None
    near = difflib.get_close_matches(setting.lower(), built_in, n=1, cutoff=0.0)[0]
    own = "One that your own module registers is named your.module:name"
    return f"there is no {kind} {setting!r}; did you mean {near}? {own}"


def registered(key: str, kind: str, setting: str, known: Mapping[str, Registered]) -> Registered:
    """The function that the setting `key` names; the module, if the setting names one, is imported first.

    Raises:
        ConfigError: the module cannot be imported, or no function is registered under that name.

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
