"""Loads users' modules: functions that a setting names as `module:name`, and classes of environments.

Users' modules are in the folder in which the run was started. This folder becomes the last entry of the import path,
and only when a setting names a module. So a file there never shadows a module of Python, of an installed package or of
Baton.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from service.environment_variables import USER_FOLDER
from service.errors import ConfigError

Registered = TypeVar("Registered")


def user_folder() -> Path:
    """The folder of users' modules: the folder in which the run was started."""
    return Path(os.environ.get(USER_FOLDER) or Path.cwd())


def enter_user_folder() -> None:
    """Make the user's folder the current folder, if it exists on this machine, because an environment may read files
    there."""
    with suppress(OSError):  # every trajectory calls this, and checking first takes longer
        os.chdir(os.environ.get(USER_FOLDER) or ".")


def import_user_module(name: str) -> ModuleType:
    """Import the module that a setting names.

    Raises:
        ImportError: there is no such module, or another module of that name comes first on the import path.
        Exception: whatever the module raises while it is imported.
    """
    find_user_module(name)
    return import_module(name)


def find_user_module(name: str) -> bool:
    """True if the module that a setting names can be found, judged by its top-level package; nothing is imported.

    Raises:
        ImportError: the user's folder has a module of that name, but another module comes first on the import path.
    """
    package, folder = name.partition(".")[0], str(user_folder())
    if folder not in sys.path:
        sys.path.append(folder)
    found, own = find_spec(package), PathFinder.find_spec(package, [folder])
    if found and own and own.origin and os.path.realpath(found.origin or "") != os.path.realpath(own.origin):
        raise ImportError(
            f"{own.origin} has the name of another module, {found.origin}, which comes first; give it another name"
        )
    return found is not None


def import_object(
    key: str, path: str, load: Callable[[str], ModuleType] = import_user_module
) -> tuple[ModuleType, Any]:
    """The module and the object that a setting `module:name` names. `key`: the setting's full name, for messages;
    `load`: imports the module.

    Raises:
        ConfigError: the import failed, or the module has no such name.
    """
    module_name, _, name = path.partition(":")
    form = f"{module_name.removesuffix('.py').replace('/', '.')}:{name or 'NAME'}"
    write = "" if path == form else f"; write {form}"
    try:
        module = load(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(
            f"{key}: {path} cannot be loaded, importing {module_name} failed: {type(error).__name__}: {error} "
            f"(modules are looked up among installed packages and in {user_folder()}){write}"
        ) from error
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else write
        raise ConfigError(f"{key}: {path} cannot be loaded, {module_name} has no {name or 'name'}{hint}")
    return module, getattr(module, name)


def meant(word: str, names: Sequence[str]) -> str:
    """What a mistyped word may mean: a name that contains the word, else the most similar name, else any of the names.

    >>> meant("ppo", ["gspo", "ppo_clip"]), meant("cliip", ["ppo", "clip"]), meant("rank", ["ppo", "clip"])
    ('did you mean ppo_clip?', 'did you mean clip?', 'there are ppo, clip.')
    """
    parts = [name for name in names if set(word.lower().split("_")) <= set(name.split("_"))]
    near = parts or difflib.get_close_matches(word.lower(), names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."


def malformed_name(kind: str, setting: str, built_in: Sequence[str]) -> str | None:
    """A text that says what is wrong with a setting that names a function; None if its form is valid. No module is
    imported.

    >>> malformed_name("loss", "ppo_clop", ["ppo_clip"])
    "there is no loss 'ppo_clop'; did you mean ppo_clip? A name from your own module has the form your.module:name"
    """
    if setting.rpartition(":")[0]:
        return None if is_module_and_name(setting) else f"{setting!r:.80} is no module:name: nothing can be imported"
    if setting in built_in:
        return None
    own = "A name from your own module has the form your.module:name"
    return f"there is no {kind} {setting!r:.80}; {meant(setting, built_in)} {own}"


def is_module_and_name(setting: str) -> bool:
    """True if a setting has the form `module:name`.

    >>> is_module_and_name("my.losses:clip"), is_module_and_name("my losses:clip"), is_module_and_name("clip")
    (True, False, False)
    """
    module, _, name = setting.partition(":")
    return name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def registered(key: str, kind: str, setting: str, known: Mapping[str, Registered]) -> Registered:
    """The registered function that a setting names; if the setting is `module:name`, the module is imported first.
    `key`: the setting's full name.

    Raises:
        ConfigError: the module cannot be imported, or no function is registered under that name.

    >>> registered("algorithm.loss", "loss", "clip", {"clip": 0.2})
    0.2
    """
    module, _, name = setting.rpartition(":")
    if module:
        try:
            own = import_user_module(module)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{key}: the module {module!r} cannot be imported: {why}") from error
    if module and name not in known and callable(getattr(own, name, None)):
        raise ConfigError(f'{key}: {setting} is not registered; put the decorator @{kind}("{name}") above the function')
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
        raise ConfigError(f"{key}: no {kind} is named {name!r}{meant}")
    return known[name]
