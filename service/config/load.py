"""Loads a `Config` from files and overrides. An error message gives the place, the key and the likely correction."""

from __future__ import annotations

import argparse
import difflib
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.config.checks import check, problems
from service.config.engine_options import refusal
from service.config.section import PATTERNS
from service.config.source import ConfigSource, KeyPath, plain, read_sources, short
from service.config.tree import Config
from service.errors import ConfigError, UserError

BOUNDS = {"gt", "ge", "lt", "le", "multiple_of"}
"""Pydantic's names of bounds. If a value fits no type of a union, an error about a bound comes before an error about a
type."""
KINDS = {
    "string_type": "must be text, not {shown} (write it in quotes inside the value: '\"{shown}\"')",
    "path_type": "must be text, not {shown} (write it in quotes inside the value: '\"{shown}\"')",
    "model_type": "is a section with keys of its own, not a value like {shown}",
    "dict_type": "is a mapping, not {shown}; write {{NAME: VALUE}}",
    "int_parsing_size": "must be a smaller number, not {shown}",
    "tuple_type": "is a list, not {shown}; write [{value}]",
}
"""By pydantic's name of an error: the message about a value of the wrong type."""

Rules = Callable[[Config], list[str]]
"""Finds what is wrong with a configuration whose keys and values are valid: a line for each mistake."""

INPUT = "Input should be "
"""The beginning of most error messages of pydantic."""


class Loaded(NamedTuple):
    """A configuration, and the places where its values were set."""

    config: Config
    source: ConfigSource


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Load the configuration from YAML files, merged key by key in order, and then from `section.key=value`
    overrides."""
    return load(files, overrides).config


def load(files: Sequence[Path], overrides: Sequence[str] = (), rules: Rules | None = None) -> Loaded:
    """Load a configuration with the place where each value was set; `ConfigError` has a line for each unknown key and
    wrong value, and then the lines of `rules` about the other settings."""
    source = read_sources(files, overrides)
    try:
        return Loaded(Config.model_validate(source.values), source)
    except ValidationError as error:
        # A value that fits no member of a union is reported once for each member.
        by_path: dict[KeyPath, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False):
            by_path.setdefault(_tree_path(detail, source), []).append(detail)
        lines = [
            source.line(path, _message(details, path))
            for path, details in by_path.items()
            if not any(other[: len(path)] == path for other in by_path if other != path)  # another member fits better
        ]
        told = "\n".join([*lines, *(_told_besides(rules, source.values, by_path, lines) if rules else ())])
        with source.named_in_errors():
            raise ConfigError(told) from None


def checked_config(arguments: argparse.Namespace, overrides: list[str], rules: Rules | None = None) -> Loaded:
    """Load and check the configuration that a command line gives, with the place where each value was set. `UserError`
    if it is missing or wrong. `rules`: those of a caller that checks combinations of settings itself."""
    no_more_words(arguments)
    if not arguments.config:
        raise UserError("give a configuration: --config FILE (such as --config configs/quickstart.yaml)")
    loaded = load(arguments.config, overrides, rules or problems)
    if rules is None:
        check(loaded.config, loaded.source)
    return loaded


def no_more_words(arguments: argparse.Namespace) -> None:
    """Raises `UserError` if a word of a command line is no argument and no setting."""
    if arguments.overrides:
        word = arguments.overrides[0]
        hint = f"; did you mean --config {word}?" if word.endswith((".yaml", ".yml")) else ""
        if word.endswith(("}", "]", ",")):  # the shell has split a value at its spaces
            hint = "; put quotes around a setting that has spaces: 'section.key={KEY: value}'"
        elif "=" in word:  # for example the label of a host
            hint = "; a key with characters other than letters, digits, _ goes into braces: 'section.key={KEY: value}'"
        raise UserError(f"{word!r}: not of the form section.key=value{hint}")


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML, including defaults; loading the text gives an equal configuration."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text


def key_paths(model: type[BaseModel] = Config, prefix: KeyPath = ()) -> list[KeyPath]:
    """The paths of all keys in the configuration tree, both of sections and of single settings."""
    paths: list[KeyPath] = []
    for name, field in model.model_fields.items():
        paths.append((*prefix, name))
        section = section_of(field.annotation)
        if section is not None:
            paths.extend(key_paths(section, (*prefix, name)))
    return paths


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class in a field's type, such as `Section | None`; None if the field is a single setting."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            if (section := section_of(member)) is not None:
                return section
    return None


def _told_besides(rules: Rules, values: Mapping[str, Any], wrong: Collection[KeyPath], lines: list[str]) -> list[str]:
    """The lines of `rules` that have to do with none of the keys that are wrong, or meant, according to `lines`.
    Needs of memory depend on most settings."""
    rest: Any = deepcopy(values)
    try:
        for path in sorted(wrong, key=len, reverse=True):
            section = rest
            for key in path[:-1]:
                section = section[key]
            section.pop(path[-1], None)
        config = Config.model_validate(rest)
    except (ValidationError, LookupError, TypeError, AttributeError):  # a key is missing, or a value of a list is wrong
        return []
    meant = re.findall(r"did you mean (?:\w+\.)*(\w+)", " ".join(lines))
    unknown = {*meant, *(path[-1] for path in wrong)} & {path[-1] for path in key_paths()}
    unknown |= {config.env.name} if "name" in unknown else set()  # perhaps the default, which nobody chose
    sizes = "buffer.max_bytes", "buffer.max_group_bytes", "buffer.max_journal_bytes"
    return [one for one in rules(config) if not unknown & {*re.findall(r"\w+", one)} and not one.startswith(sizes)]


def _tree_path(detail: ErrorDetails, source: ConfigSource) -> KeyPath:
    """The path of the key, without the tags that pydantic adds for members of a union."""
    known, path = {*key_paths(), *source.places}, KeyPath()
    for part in map(str, detail["loc"]):
        path = (*path, part) if (*path, part) in known else path
    is_key = detail["type"] == "missing" and isinstance(detail["input"], Mapping)
    return (*path, str(detail["loc"][-1])) if is_key else path


def _message(details: Sequence[ErrorDetails], path: KeyPath) -> str:
    """What is wrong with the value at a path. For a union: all allowed types, or the bound that the value violates."""
    details = [detail for detail in details if detail["type"] != "too_short"] or details  # its members are wrong
    details = [detail for detail in details if BOUNDS & detail.get("ctx", {}).keys()][:1] or details
    kind, value, context = details[0]["type"], details[0]["input"], details[0].get("ctx", {})
    shown = "null" if value is None else short(value)
    if kind == "extra_forbidden":
        return f"unknown key{_nearest_key(path, value)}"
    if kind == "missing":
        return "is not set, and has no default" if isinstance(value, Mapping) else f"{shown} has too few values"
    if kind in KINDS and len(details) == 1:
        return KINDS[kind].format(shown=shown, value=plain(str(value)))
    if kind == "value_error":  # one of Baton's validators wrote the whole text
        return f"{context['error']}, not {shown}"
    if (pattern := context.get("pattern")) in PATTERNS:
        return f"{shown} must {PATTERNS[pattern]}"
    if not details[0]["msg"].startswith(INPUT):
        return f"must {details[0]['msg'].partition(' should ')[2] or details[0]['msg']}, not {shown}"
    wanted = " or ".join(dict.fromkeys(map(_wanted, details)))
    choices = [choice for detail in details for choice in re.findall("'(.*?)'", detail["msg"])]
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    return f"must be {wanted}, not {shown}" + (f" (did you mean {close[0]}?)" if close else "")


def _wanted(detail: ErrorDetails) -> str:
    """Pydantic's text about the expected value, without its reason."""
    if detail["type"] == "model_type":
        return "a section"
    text = detail["msg"].removeprefix(INPUT)
    return text if detail["type"] == "literal_error" else text.partition(", ")[0]


def _nearest_key(path: KeyPath, value: Any) -> str:
    """A hint for an unknown key: a similar key, of this section or another one; else the section's keys."""
    if path[:-1] == ("generator",) and (why := refusal(path[-1])) is not None:
        return f": {why}"
    siblings = _keys_of(path[:-1])
    known = {key[-1]: key for key in reversed(key_paths())} | {key: (*path[:-1], key) for key in siblings}
    inner = str(next(iter(value))) if isinstance(value, Mapping) and value else path[-1]
    for word, words, least in ((path[-1], siblings, 0.6), (inner, known, 0.8)):
        if close := difflib.get_close_matches(word, words, n=1, cutoff=least):
            return f" (did you mean {'.'.join(known[close[0]])}?)"
    return f" (valid here: {', '.join(siblings)})" if siblings else ""


def _keys_of(path: KeyPath) -> list[str]:
    """The keys of the section at a path; the section may be one of a mapping by name, such as `scorers.judge`."""
    here: Any = Config
    for key in path:
        section = section_of(here)
        field = None if section is None else section.model_fields.get(key)
        here = get_args(here)[1] if get_origin(here) is dict else field and field.annotation
    section = section_of(here)
    return [] if section is None else [*section.model_fields]
