"""Loads a `Config` from files and overrides; an error names the place, the key and the likely correction."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.config.gone import GONE
from service.config.section import PATTERNS
from service.config.source import KeyPath, Source, plain, read_sources, short
from service.config.tree import Config
from service.errors import ConfigError

BOUNDS = {"gt": "more than {}", "ge": "{} or more", "lt": "less than {}", "le": "{} or less"}
"""Pydantic's name of a bound -> the bound in words."""
BOOLEAN = "true, false"
KINDS = {
    **dict.fromkeys(("bool_type", "bool_parsing"), BOOLEAN),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "literal_error": "{expected}",
    "model_type": "{section}",
}
"""Pydantic's name of an error -> what the value should have been."""
NEGATIONS = ("none", "None", None, "never")
"""What is written for false."""


class Loaded(NamedTuple):
    """A configuration, and where its values were set."""

    config: Config
    source: Source


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration of YAML files merged deep in order, then of `section.key=value` overrides."""
    return load(files, overrides).config


def load(files: Sequence[Path], overrides: Sequence[str] = ()) -> Loaded:
    """As `load_config`, with the place of every value.

    Raises:
        ConfigError: names every unknown key and every wrong value, a line each.
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
            source.line(path, _messages(details, path))
            for path, details in by_path.items()
            if not any(other[: len(path)] == path for other in by_path if other != path)  # another member fits better
        ]
        raise ConfigError("\n".join(lines)) from None


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; it loads to the same configuration."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text


def key_paths(model: type[BaseModel] = Config, prefix: KeyPath = ()) -> list[KeyPath]:
    """Every path of the tree, sections and leaves."""
    paths: list[KeyPath] = []
    for name, field in model.model_fields.items():
        paths.append((*prefix, name))
        section = section_of(field.annotation)
        if section is not None:
            paths.extend(key_paths(section, (*prefix, name)))
    return paths


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section behind a field's type, also behind `Section | None`; None for a leaf."""
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


def _messages(details: Sequence[ErrorDetails], path: KeyPath) -> str:
    """One message of the errors at a path: what the value nearly is, or else all that it may be."""
    for detail in details:
        if any(name in BOUNDS for name in detail.get("ctx", {})):
            return _message(detail, path)
    if len(details) == 1 or not all(detail["type"] in KINDS for detail in details):
        return _message(details[0], path)
    section = f"a section with {', '.join(_keys_of(path))}"
    kinds = [KINDS[detail["type"]].format(section=section, **detail.get("ctx", {})) for detail in details]
    value = details[0]["input"]
    hint = " (did you mean false?)" if BOOLEAN in kinds and value in NEGATIONS else ""
    return f"must be {', '.join(kinds[:-1])} or {kinds[-1]}, not {'null' if value is None else short(value)}{hint}"


def _message(detail: ErrorDetails, path: KeyPath) -> str:
    value = detail.get("input")
    if detail["type"] == "extra_forbidden":
        gone = GONE.get(".".join(path))
        return f"this setting is gone: {gone}" if gone else f"unknown key{_unknown_hint(path)}"
    if detail["type"] == "missing":
        return "is not set, and has no default" if isinstance(value, Mapping) else f"{short(value)} has too few values"
    if detail["type"] == "literal_error":
        return f"{short(value)} is not one of {detail['ctx']['expected']}{_literal_hint(value, detail)}"
    if detail["type"] == "string_type" and isinstance(value, Mapping):
        keys = short(", ".join(f"{key!s}:" for key in value))[1:-1]
        return f"must be text, but YAML reads {keys} as a key; put quotes around it"
    if detail["type"] == "string_type":
        return f"must be text, not {short(value)} (write it in quotes inside the value: '\"{short(value)}\"')"
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"is a section with keys of its own, not a value like {short(value)}"
    if detail["type"] == "dict_type":
        return f"is a mapping, not {short(value)}; write {{NAME: VALUE}}"
    if detail["type"] == "string_pattern_mismatch":
        pattern = detail["ctx"]["pattern"]
        return f"{short(value)} must {PATTERNS.get(pattern, f'match {pattern}')}"
    if detail["type"] in ("tuple_type", "list_type"):
        return f"is a list, not {short(value)}; write [{plain(str(value))}]"
    for name, value_of in detail.get("ctx", {}).items():
        if name in BOUNDS:
            return f"must be {_bound(name, value_of)}, not {short(value)}"
    if (kind := KINDS.get(detail["type"], "{")) and "{" not in kind:
        return f"must be {kind.replace(', ', ' or ')}, not {'null' if value is None else short(value)}"
    if detail["type"] == "value_error":  # a validator of Baton's has written the whole text
        return f"{detail['ctx']['error']}, not {short(value)}"
    text = detail["msg"][:1].lower() + detail["msg"][1:]
    return text if isinstance(value, Mapping) else f"{text}, not {short(value)}"


def _bound(name: str, value: float) -> str:
    """A bound in words; of whole numbers, the last one within it."""
    if isinstance(value, int) and name in ("gt", "lt"):
        name, value = ("ge", value + 1) if name == "gt" else ("le", value - 1)
    return BOUNDS[name].format(value if isinstance(value, int) else f"{value:g}")


def _unknown_hint(path: KeyPath) -> str:
    """The key that was most likely meant: one of the same section, or one of that name; else the section's keys."""
    known, siblings = key_paths(), _keys_of(path[:-1])
    same = [".".join(other) for other in known if other[-1] == path[-1]]
    if not same and (close := difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.6)):
        return f" (did you mean {'.'.join((*path[:-1], close[0]))}?)"
    close = difflib.get_close_matches(path[-1], [other[-1] for other in known], n=1, cutoff=0.8)
    if nearest := " or ".join((same or [".".join(other) for other in known if other[-1] in close])[:2]):
        return f" (did you mean {nearest}?)"
    return f" (valid here: {', '.join(siblings)})" if siblings else ""


def _keys_of(path: KeyPath) -> list[str]:
    """The keys of the section at a path, which may be one of several by name, such as `scorers.judge`."""
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


def _literal_hint(value: object, detail: ErrorDetails) -> str:
    choices = [choice.strip("'\" ") for choice in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
