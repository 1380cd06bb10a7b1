"""Reads YAML files and dotted overrides into one nested dict, and records where each value was set.

base.yaml:3   trainer: {lr: 1e-6, ranks: 2}
mine.yaml:1   trainer: {lr: 1e-4}               ->  {"trainer": {"lr": 2e-4, "ranks": 2}}
trainer.lr=2e-4                                     places[("trainer", "lr")] = "override trainer.lr=2e-4"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from service.errors import ConfigError, UserError

MOST_CHARACTERS = 10_000_000
"""Maximum characters of a configuration file."""
MOST_VALUES = 10_000
"""Maximum number of values in a file: a few aliases of aliases can stand for billions of values."""
SHOWN = 120
"""Maximum characters of a value in an error message."""

KeyPath = tuple[str, ...]

_OVERRIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_-]+)*)=(.*)", re.DOTALL)
_FLOAT = r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 scalars: `merge: off` is a word, `lr: 1e-4` a number, and `010` is ten."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _starts in (
    ("bool", r"^(?:true|True|false|False)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_starts))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(node.value))


@dataclass
class ConfigSource:
    """The merged values of files and overrides. For each key also the place that set its final value: file and line, or
    the override."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str | None:
        """The place where the value at `path`, or else at its nearest parent, was set; None if neither was set."""
        return next((self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places), None)

    def line(self, path: KeyPath, message: str) -> str:
        """A line of an error message about the value at `path`; it begins with the place where the value was set."""
        place, setting = self.place(path) or "", plain(".".join(path))
        if place.startswith(f"override {setting}="):  # the place names the setting already
            return f"{place}: {message}"
        between = ": " if place.startswith("override ") else "  "
        return f"{place}{between if place else ''}{setting}: {message}"

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Within the block, complete the message of a `UserError`: to each line that begins with a setting, add the
        place that set it."""
        try:
            yield
        except UserError as error:
            lines = []
            for line in str(error).splitlines():
                setting, colon, message = line.partition(": ")
                path = tuple(setting.split("."))
                lines.append(self.line(path, message) if colon and self.place(path) else line)
            raise type(error)("\n".join(lines)) from error

    def merge(self, values: Mapping[str, Any], places: Mapping[KeyPath, str], path: KeyPath = ()) -> None:
        """Merge `values` into the values below `path`, and `places` into the places. Mappings are merged key by key;
        any other value, and an empty mapping, replaces the old value."""
        into = self.values
        for key in path:
            into = into[key]
        for key, value in values.items():
            here = (*path, key)
            if isinstance(value, dict) and value and isinstance(into.get(key), dict):
                self.merge(value, places, here)
            else:
                into[key] = value
                kept = {place: text for place, text in self.places.items() if place[: len(here)] != here}
                self.places = kept | {place: text for place, text in places.items() if place[: len(here)] == here}


def read_sources(files: Sequence[Path], overrides: Sequence[str]) -> ConfigSource:
    """Read the files and the overrides, and merge them key by key, in order. `ConfigError` if a file or override cannot
    be read or has the wrong form."""
    source = ConfigSource()
    for file in files:
        values, places = _parsed(_read_text(Path(file)), str(file))
        if not isinstance(values, dict | None):
            raise ConfigError(f"{file}:1  a configuration file holds `section:` mappings")
        source.merge(values or {}, places)
    for word in overrides:
        if (match := _OVERRIDE.fullmatch(word)) is None:
            raise ConfigError(f"override {short(word)}: not of the form section.key=value")
        path, name = tuple(match[1].split(".")), f"override {plain(word)}"
        value, places = _parsed(match[2], name, path)
        for key in reversed(path[1:]):
            value = {key: value}
        parents = [path[:n] for n in range(1, len(path) + 1)]
        source.merge({path[0]: value}, dict.fromkeys([*parents, *places], name))
    return source


def _read_text(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as lines:  # a device may have no end
            text = lines.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise ConfigError(f"{file}: has more than {MOST_CHARACTERS} characters, so it is no configuration")
        return text
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the configuration file: {error.strerror}") from None


def _parsed(text: str, name: str, path: KeyPath = ()) -> tuple[Any, dict[KeyPath, str]]:
    """The plain values of a YAML text, and file and line of each value. `path`: where the text belongs."""
    places: dict[KeyPath, str] = {}
    room = iter(range(MOST_VALUES))

    def line(node: yaml.Node, here: KeyPath, wrong: str) -> str:
        return f"{name}:{node.start_mark.line + 1}  {plain('.'.join(here))}: {wrong}"

    def value(node: yaml.Node, here: KeyPath) -> Any:
        if next(room, None) is None:
            raise ConfigError(f"{name}  not a configuration: it has more than {MOST_VALUES} values, with its aliases")
        if isinstance(node, yaml.SequenceNode):
            return [value(item, (*here, str(index))) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return mapping(node, here)
        try:
            return loader.construct_object(node)
        except (yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError):
            raise ConfigError(line(node, here, f"cannot read the value {short(node.value)}")) from None

    def mapping(node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(line(key, path, "a key is one word"))
            here = (*path, key.value)
            if key.value in values:
                raise ConfigError(line(key, here, "this key occurs twice"))
            places[here] = f"{name}:{key.start_mark.line + 1}"
            values[key.value] = value(inner, here)
        return values

    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return (None if root is None else value(root, path)), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{place}  not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:  # an alias may be part of its own value
        raise ConfigError(f"{name}  not a configuration: {str(error).splitlines()[0]}") from None


def plain(text: str) -> str:
    """The text, with the credentials in an address masked. If it is not one short line, `short` quotes and cuts it."""
    text = re.sub(r"(\w://)[^/?#\s]*@", r"\1***@", text)
    text = re.sub(r"(\w://[^?#\s]*[?#])[^\s]+", r"\1***", text)
    return text if text.isprintable() and len(text) <= SHOWN else short(text)


def short(value: object) -> str:
    """The value on one line for an error message; a long value is cut off."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
