"""Checks `generator.engine_options`. Each of vLLM's engine arguments is either set by Baton, passed on, passed on with
a warning, or refused; engine_options.toml lists the arguments with the reasons."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import TypeAdapter, ValidationError


class Judgement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Baton does with certain engine arguments that a user sets, and the reason."""

    verdict: Literal["owned", "passed", "warned", "refused"]
    reason: str
    fields: tuple[str, ...] = ()


_FILE = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, list[Judgement]])
JUDGED = {field: judged for judged in _FILE["judged"] for field in judged.fields}
"""The `Judgement` of each engine argument, by name, for the vLLM version in the lock files."""

PLAIN: Mapping[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "None": None
}  # fmt: skip
"""Types whose values are checked here; vLLM checks values of other types when an engine starts."""

AT_LEAST_1 = ("pipeline_parallel_size", "max_num_batched_tokens")
"""Engine arguments that must be at least 1. They are checked here, because Baton uses them before vLLM would check
them."""


def refusals(options: Mapping[str, Any]) -> Iterator[str]:
    """One line for each option that cannot be set, or whose value is not valid."""
    fields = installed_fields()
    for name, value in options.items():
        setting, judged = f"generator.engine_options.{name}", JUDGED.get(name)
        if name not in (fields or JUDGED):
            near = difflib.get_close_matches(name, fields or JUDGED, n=1)
            yield f"{setting}: vLLM has no such engine argument" + (f"; did you mean {near[0]}?" if near else "")
        elif judged is not None and judged.verdict == "owned":
            yield f"{setting}: Baton sets it: {judged.reason}"
        elif judged is not None and judged.verdict == "refused":
            yield f"{setting}: is refused: {judged.reason}"
        elif (kind := fields.get(name)) is not None and not _fits(value, kind):
            yield f"{setting}: must be {kind.replace(' | ', ' or ')}, not {value!r}"
        elif name in AT_LEAST_1 and type(value) is int and value < 1:
            yield f"{setting}: must be at least 1, not {value}"


def warnings(options: Mapping[str, Any]) -> Iterator[str]:
    """One line for each option that can be set, but with which a run may go wrong."""
    for name in options:
        judged = JUDGED.get(name, Judgement("warned", "this vLLM is newer than Baton's table of its options"))
        if judged.verdict == "warned":
            yield f"generator.engine_options.{name}: {judged.reason}"


@cache
def installed_fields() -> Mapping[str, str]:
    """The type of each engine argument as text, by name, read from the source of the installed vLLM without importing
    it; empty if vLLM is not installed."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return {}
    source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text()
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _fits(value: Any, kind: str) -> bool:
    """Whether a value fits a type; always True for a type with parts that are not in `PLAIN`, which vLLM checks."""
    names = [name.partition("[")[0] for name in kind.split(" | ")]
    return not PLAIN.keys() >= set(names) or any(_is(value, PLAIN[name]) for name in names)


def _is(value: Any, kind: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True
