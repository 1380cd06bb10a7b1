"""Loads a `Config` from files and overrides; an error message gives the place, the key and the likely correction."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.config.gone import GONE
from service.config.section import MOST, PATTERNS
from service.config.source import KeyPath, Source, plain, read_sources, short
from service.config.tree import Config
from service.errors import ConfigError

CLOSE = 0.8
"""Similarity from which another name is suggested, even if the typed name exists elsewhere in the configuration."""

BOUNDS = {"gt", "ge", "lt", "le", "multiple_of"}
"""Pydantic's names of bounds. If a value fits no type of a union, an error about a bound is preferred to one about a
type."""


INPUT = "Input should be "
"""The beginning of most error messages of pydantic."""


class Loaded(NamedTuple):
    """A configuration, and the places where its values were set."""

    config: Config
    source: Source


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Load the configuration from YAML files, merged key by key in order, and then from `section.key=value`
    overrides."""
    return load(files, overrides).config


def load(files: Sequence[Path], overrides: Sequence[str] = ()) -> Loaded:
    """Load a configuration as `load_config` does, together with the place where each value was set.

    Raises:
        ConfigError: has one line for each unknown key and each wrong value.
    """
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
        raise ConfigError("\n".join(lines)) from None


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
    """The section class in the type of a field, such as `Section` or `Section | None`; None if the field is a single
    setting."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            if (section := section_of(member)) is not None:
                return section
    return None


def _tree_path(detail: ErrorDetails, source: Source) -> KeyPath:
    """The path of the key, without the tags that pydantic adds for members of a union."""
    known, path = {*key_paths(), *source.places}, KeyPath()
    for part in map(str, detail["loc"]):
        path = (*path, part) if (*path, part) in known else path
    is_key = detail["type"] == "missing" and isinstance(detail["input"], Mapping)
    return (*path, str(detail["loc"][-1])) if is_key else path


def _message(details: Sequence[ErrorDetails], path: KeyPath) -> str:
    """What is wrong with the value at a path; for a union, all allowed kinds, or the bound that the value violates."""
    details = [detail for detail in details if detail["type"] != "too_short"] or details  # its members are wrong
    bounds = [detail for detail in details if BOUNDS & detail.get("ctx", {}).keys()]
    details = bounds[:1] or details
    kind, value, context = details[0]["type"], details[0]["input"], details[0].get("ctx", {})
    shown = "null" if value is None else short(value)
    if gone := GONE.get(f"{'.'.join(path)}={value}"):
        return f"{shown} is gone: {gone}"
    if kind == "extra_forbidden":
        gone = GONE.get(".".join(path))
        return f"this setting is gone: {gone}" if gone else f"unknown key{_unknown_hint(path)}"
    if kind == "missing":
        return "is not set, and has no default" if isinstance(value, Mapping) else f"{shown} has too few values"
    if kind == "string_type" and isinstance(value, Mapping):
        keys = short(", ".join(f"{key!s}:" for key in value))[1:-1]
        return f"must be text, but YAML reads {keys} as a key; put quotes around it"
    if kind == "int_parsing_size":
        return f"{shown} is more than {MOST:.0e}, the largest number that a setting takes"
    if kind in ("string_type", "path_type"):
        return f"must be text, not {shown} (write it in quotes inside the value: '\"{shown}\"')"
    if kind == "model_type" and len(details) == 1:
        return f"is a section with keys of its own, not a value like {shown}"
    if kind == "dict_type":
        return f"is a mapping, not {shown}; write {{NAME: VALUE}}"
    if kind == "tuple_type":
        return f"is a list, not {shown}; write [{plain(str(value))}]"
    if kind == "value_error":  # a validator of Baton's has written the whole text
        return f"{context['error']}, not {shown}"
    if (pattern := context.get("pattern")) in PATTERNS:
        return f"{shown} must {PATTERNS[pattern]}"
    if not details[0]["msg"].startswith(INPUT):
        return f"must {details[0]['msg'].partition(' should ')[2] or details[0]['msg']}, not {shown}"
    wanted = " or ".join(dict.fromkeys(_wanted(detail, path) for detail in details))
    return f"must be {wanted}, not {shown}{_nearest_choice(value, details)}"


def _wanted(detail: ErrorDetails, path: KeyPath) -> str:
    """Pydantic's text about the expected value, without its reason."""
    if detail["type"] == "model_type":
        return f"a section with {', '.join(_keys_of(path))}"
    text = detail["msg"].removeprefix(INPUT).partition(", ")
    return "".join(text) if detail["type"] == "literal_error" else text[0]


def _nearest_choice(value: object, details: Sequence[ErrorDetails]) -> str:
    if any(detail["type"].startswith("bool") for detail in details) and value in ("none", "None", None, "never"):
        return " (did you mean false?)"
    choices = [
        choice for detail in details for choice in re.findall(r"'(.*?)'", detail.get("ctx", {}).get("expected", ""))
    ]
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _unknown_hint(path: KeyPath) -> str:
    """A hint for an unknown key: a similar key of the section, a key of that name elsewhere, or the section's keys."""
    known, siblings = key_paths(), _keys_of(path[:-1])
    same = [".".join(other) for other in known if other[-1] == path[-1]]
    likely = CLOSE if same else 0.6
    if (not same or len(path) == 1) and (close := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=likely)):
        return f" (did you mean {'.'.join((*path[:-1], close[0]))}?)"
    close = difflib.get_close_matches(path[-1], [other[-1] for other in known], n=1, cutoff=CLOSE)
    if nearest := " or ".join((same or [".".join(other) for other in known if other[-1] in close])[:2]):
        return f" (did you mean {nearest}?)"
    return f" (valid here: {', '.join(siblings)})" if siblings else ""


def _keys_of(path: KeyPath) -> list[str]:
    """The keys of the section at a path; the section may be one of a mapping by name, such as `scorers.judge`."""
    here: Any = Config
    for key in path:
        if get_origin(here) is dict:
            here = get_args(here)[1]
        else:
            section = section_of(here)
            field = None if section is None else section.model_fields.get(key)
            here = None if field is None else field.annotation
    section = section_of(here)
    return [] if section is None else [*section.model_fields]
