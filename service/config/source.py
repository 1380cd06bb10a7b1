"""Reads YAML files and dotted overrides into one nested dict that remembers where each value came from.

base.yaml:3   trainer: {lr: 1e-6, ranks: 2}
mine.yaml:1   trainer: {lr: 1e-4}               ->  {"trainer": {"lr": 2e-4, "ranks": 2}}
trainer.lr=2e-4                                     places[("trainer", "lr")] = "override trainer.lr=2e-4"
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from service.errors import ConfigError

MAX_FILE_BYTES = 1 << 16
"""A configuration is written by hand; anything larger is the wrong file."""

MAX_DEPTH = 32
"""Far more than the tree has; keeps a nest of brackets from exhausting the stack."""

SHOWN = 120
"""Characters of what was written that an error repeats."""

KeyPath = tuple[str, ...]

_OVERRIDE = re.compile(r"-{0,2}([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)=(.*)", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 scalars, so that `merge: off` is a word and `lr: 1e-4` a number."""


_Loader.yaml_implicit_resolvers = {}
_NUMBER_STARTS = list("-+.0123456789")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), _NUMBER_STARTS)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    _NUMBER_STARTS,
)


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # PyYAML reads a leading zero as octal and a colon as base sixty; here 010 is ten.
    return int(loader.construct_scalar(node))


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)

_OPENING = (
    yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken, yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken
)  # fmt: skip
_CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)


@dataclass
class Source:
    """Merged values, and for every key path the file and line (or override) that set it last."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str | None:
        """Where the value at `path` was set, or the nearest parent's place."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None


def read_sources(files: Sequence[Path], overrides: Sequence[str]) -> Source:
    """Files merged deep, in order; then the overrides, in order."""
    source = Source()
    for file in files:
        _merge_file(source, Path(file))
    for path, value, text in _pair_overrides(overrides):
        _set_override(source, path, value, text)
    return source


def _merge_file(source: Source, file: Path) -> None:
    root = _compose(_read_text(file), str(file))
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{file}:{root.start_mark.line + 1}  a configuration file holds `section:` mappings")
    reader = _Reader(str(file))
    _merge(source, reader.mapping(root, ()), (), reader.found)


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
        raise ConfigError(f"{file}: cannot read the configuration file: {error.strerror}") from None


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        _refuse_odd_nesting(text, name)
        root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return root
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{place}  not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}  not YAML: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{name}  not a configuration: nested too deeply") from None


def _refuse_odd_nesting(text: str, name: str) -> None:
    """Token by token, and no further than needed: PyYAML takes seconds over thousands of brackets."""
    depth = 0
    for token in yaml.scan(text, Loader=_Loader):
        if isinstance(token, yaml.AliasToken):
            raise ConfigError(f"{name}: aliases (`*name`) are not read; write the value out")
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name}:{token.start_mark.line + 1}  not a configuration: nested too deeply")


class _Reader:
    """Turns the nodes of one file into plain values and notes their lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: dict[KeyPath, str] = {}
        self._scalars = _Loader("")

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        """The dict of a mapping; a key that is there twice is refused."""
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._at(key_node)}  {plain('.'.join(path))}: a key is one word")
            if key in values:
                raise ConfigError(f"{self._at(key_node)}  {plain('.'.join((*path, key)))}: this key is here twice")
            self.found[(*path, key)] = self._at(key_node)
            values[key] = self.value(value_node, (*path, key))
        return values

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        """The plain value of a node."""
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, str(index))) for index, item in enumerate(node.value)]
        try:
            value: Hashable = self._scalars.construct_object(node)
            return value
        except (yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError):
            where = f"{self._at(node)}  {plain('.'.join(path))}"
            raise ConfigError(f"{where}: cannot read the value {short(node.value)}") from None

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


def plain(text: str) -> str:
    """The text as it is where it is short and stays in its line, else as `short` has it."""
    return text if text.isprintable() and len(text) <= SHOWN else short(text)


def short(value: object) -> str:
    """The value as an error shows it: in one line, and not all of a long one."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _merge(source: Source, values: dict[str, Any], path: KeyPath, found: dict[KeyPath, str]) -> None:
    target = source.values
    for key in path:
        target = target[key]
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(source, value, here, found)
            continue
        _forget(source.places, here)
        target[key] = value
        source.places.update({place: line for place, line in found.items() if place[: len(here)] == here})


def _forget(places: dict[KeyPath, str], path: KeyPath) -> None:
    for place in [place for place in places if place[: len(path)] == path]:
        del places[place]


def _pair_overrides(overrides: Sequence[str]) -> list[tuple[KeyPath, str, str]]:
    """`a.b=c`, `--a.b=c` and `--a.b c` as (path, text of the value, what the user wrote)."""
    pairs: list[tuple[KeyPath, str, str]] = []
    waiting: str | None = None
    for word in overrides:
        if waiting is not None:
            pairs.append((tuple(waiting[2:].split(".")), word, f"{waiting} {word}"))
            waiting = None
        elif match := _OVERRIDE.fullmatch(word):
            pairs.append((tuple(match[1].split(".")), match[2], word))
        elif word.startswith("--"):
            waiting = word
        else:
            raise ConfigError(f"override {short(word)}: not of the form section.key=value")
    if waiting is not None:
        raise ConfigError(f"override {plain(waiting)}: the value is missing")
    return pairs


def _set_override(source: Source, path: KeyPath, text: str, written: str) -> None:
    name = f"override {plain(written)}"
    root = _compose(text, name)
    reader = _Reader(name)
    value = None if root is None else reader.value(root, path)
    target = source.values
    for length, key in enumerate(path[:-1], 1):
        if not isinstance(target.get(key), dict):
            target[key] = {}
            source.places[path[:length]] = name
        target = target[key]
    _forget(source.places, path)
    if isinstance(value, dict) and isinstance(target.get(path[-1]), dict):
        target[path[-1]] = {**target[path[-1]], **value}
    else:
        target[path[-1]] = value
    source.places[path] = name
    source.places.update(dict.fromkeys(reader.found, name))
