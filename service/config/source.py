"""Reads YAML files and dotted overrides into one nested dict, and records where each value was set.

base.yaml:3   trainer: {lr: 1e-6, ranks: 2}
mine.yaml:1   trainer: {lr: 1e-4}               ->  {"trainer": {"lr": 2e-4, "ranks": 2}}
trainer.lr=2e-4                                     places[("trainer", "lr")] = "override trainer.lr=2e-4"
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from service.config.gone import leave_out_neutral
from service.config.paths import near
from service.errors import ConfigError, UserError

MAX_FILE_BYTES = 1 << 16
"""Maximum bytes of a configuration file. A configuration is written by hand, so a larger file must be another kind of
file."""

MAX_DEPTH = 32
"""Maximum nesting of YAML values; deeper values would take PyYAML seconds, and no setting needs them."""

SHOWN = 120
"""Maximum characters of a value in an error message."""

KeyPath = tuple[str, ...]

_OVERRIDE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_-]+)*)=(.*)", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 scalars (`merge: off` is a word, `lr: 1e-4` a number) and a bounded depth."""

    yaml_implicit_resolvers: dict[str, Any] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ConfigError(f"{self.name}: aliases (`*name`) are not read; write the value out")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise ConfigError(f"{self.name}:{line}  not a configuration: nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_NUMBER_STARTS = list("-+.0123456789")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), _NUMBER_STARTS)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    _NUMBER_STARTS,
)


# PyYAML reads a leading zero as octal and a colon as base sixty; here 010 is ten.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(node.value))


@dataclass
class Source:
    """The merged values of files and overrides; and for each key, the place where its final value was set: the file and
    line, or the override."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str | None:
        """The place where the value at `path` was set, or else the place where its nearest parent was set; None if
        neither was set."""
        return next((self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places), None)

    def line(self, path: KeyPath, message: str) -> str:
        """A line of an error message about the value at `path`; it begins with the place where the value was set."""
        place, setting = self.place(path), plain(".".join(path))
        if place and place.startswith(f"override {setting}="):  # the message already begins with the setting's name
            return f"{place}: {message}"
        between = ": " if place and place.startswith("override ") else "  "
        return f"{place + between if place else ''}{setting}: {message}{self._layers(path)}"

    def _layers(self, path: KeyPath) -> str:
        """In brackets, the sources of a mapping's keys if several files or overrides set them; otherwise empty."""
        keys = {here[-1]: place for here, place in self.places.items() if here[:-1] == path}
        if len({re.sub(r":\d+$", "", place) for place in keys.values()}) < 2:
            return ""
        return f" ({', '.join(f'{plain(key)} is from {place}' for key, place in keys.items())})"

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Within the block, complete the message of a `UserError`: in each line that begins with a setting, add the
        place where the setting was set."""
        try:
            yield
        except UserError as error:
            lines = []
            for line in str(error).splitlines():
                setting, colon, message = line.partition(": ")
                path = tuple(setting.split("."))
                lines.append(self.line(path, message) + self.beside(line) if colon and self.place(path) else line)
            raise type(error)("\n".join(lines)) from error

    def beside(self, line: str) -> str:
        """A hint for an error line about a path that does not exist, if the path would exist relative to the folder of
        the configuration file in which it was set; otherwise empty."""
        path = tuple(line.partition(": ")[0].split("."))
        value: Any = self.values
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        file = re.sub(r":\d+$", "", self.place(path) or "")
        if not isinstance(value, str) or not value or os.path.exists(value) or not os.path.isfile(file):
            return ""
        there = Path(file).parent / value
        if not os.path.exists(there):
            return ""
        return f"; relative paths start at the current folder, and there is {there}"

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


def read_sources(files: Sequence[Path], overrides: Sequence[str]) -> Source:
    """Read the files and the overrides, and merge them key by key, in order.

    Raises:
        ConfigError: a file cannot be read, or a file or an override has the wrong form.
    """
    source = Source()
    for file in files:
        reader = _Reader(_read_text(Path(file)), str(file))
        if reader.root is None:
            continue
        if not isinstance(reader.root, yaml.MappingNode):
            raise ConfigError(f"{reader.at(reader.root)}  a configuration file holds `section:` mappings")
        values = reader.value(reader.root, ())
        leave_out_neutral(values)
        source.merge(values, reader.places)
    for word in overrides:
        if (match := _OVERRIDE.fullmatch(word)) is None:
            raise ConfigError(f"override {short(word)}: not of the form section.key=value")
        path, name = tuple(match[1].split(".")), f"override {plain(word)}"
        reader = _Reader(match[2], name)
        value = None if reader.root is None else reader.value(reader.root, path)
        for key in reversed(path[1:]):
            value = {key: value}
        parents = [path[:n] for n in range(1, len(path) + 1)]
        source.merge({path[0]: value}, dict.fromkeys([*parents, *reader.places], name))
    return source


def _read_text(file: Path) -> str:
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file}: cannot read the configuration file: not a file")
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: {size} bytes is too large for a configuration file (at most {MAX_FILE_BYTES})")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not a text file in UTF-8") from None
    except OSError as error:
        hint = near(file) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{file}: cannot read the configuration file: {error.strerror}{hint}") from None


class _Reader:
    """Turns a YAML text into plain values and notes the line of each value."""

    def __init__(self, text: str, name: str) -> None:
        self.places: dict[KeyPath, str] = {}
        self._name = name
        try:
            self._loader = _Loader(text)
            self._loader.name = name
            self.root: yaml.Node | None = self._loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = name if mark is None else f"{name}:{mark.line + 1}"
            raise ConfigError(f"{place}  not YAML: {error.problem or error.context}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}  not YAML: {str(error).splitlines()[0]}") from None

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """The plain value of a node; a key that occurs twice is refused."""
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            try:
                return self._loader.construct_object(node)
            except (yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError):
                where = f"{self.at(node)}  {plain('.'.join(path))}"
                raise ConfigError(f"{where}: cannot read the value {short(node.value)}") from None
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self.at(key_node)}  {plain('.'.join(path))}: a key is one word")
            key = key_node.value
            here = (*path, key)
            if key in values:
                raise ConfigError(f"{self.at(key_node)}  {plain('.'.join(here))}: this key is here twice")
            self.places[here] = self.at(key_node)
            values[key] = self.value(value_node, here)
        return values

    def at(self, node: yaml.Node) -> str:
        """File and line of a YAML node."""
        return f"{self._name}:{node.start_mark.line + 1}"


def plain(text: str) -> str:
    """The text, in which credentials in an address are masked; unless it is one short line, quoted and shortened by
    `short`."""
    text = re.sub(r"(\w://)[^/?#\s]*@", r"\1***@", text)
    text = re.sub(r"(\w://[^?#\s]*[?#])[^\s]+", r"\1***", text)
    return text if text.isprintable() and len(text) <= SHOWN else short(text)


def short(value: object) -> str:
    """The value on one line for an error message; a long value is cut off."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
