"""The form that a client wants its answer to have: JSON of a schema, or a call of one of its tools.

    response_format: {type: json_schema, json_schema: {schema: S}}      text that follows S
    text: {format: {type: json_schema, schema: S}}                      the same in Responses
    output_config: {format: {type: json_schema, schema: S}}             the same in Messages
    response_format: {type: json_object}                                text that is an object
    tool_choice: required, {type: any}                                  a call of any tool
    tool_choice: {type: function, function: {name: f}}                  a call of f

The policy answers freely, unless the run says otherwise (`agents.structured`): learning should see a bad answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from service.agents.dialects.body import FORMATS, OPTIONS, CommonFields, Name, read_as
from service.agents.dialects.dialect import AnswerForm

OBJECT: Mapping[str, Any] = {"type": "object"}
FORCES = ("required", "any", "function", "tool", "custom")
"""Kinds of `tool_choice` that force a call of a tool which the client runs."""


class _Format(Struct):
    type: Name
    schema: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None


class _Named(Struct):
    name: str | None = None


class _Choice(_Named):
    function: _Named | None = None


def forms_of(body: Mapping[str, Any], request: CommonFields) -> tuple[AnswerForm, ...]:
    """The forms that a request states; none if it leaves the policy free.

    Raises:
        Refused: a form cannot be read.
    """
    return *_forced(body.get("tool_choice"), request.choice), *_schemas(body)


def _forced(choice: Any, kind: str) -> Iterator[AnswerForm]:
    if kind in FORCES:
        named = read_as(choice, _Choice, "tool_choice") if isinstance(choice, dict) else _Choice()
        yield AnswerForm("tool_choice", forces_call=True, tool=(named.function or named).name)
    elif kind not in ("auto", "none"):
        yield AnswerForm("tool_choice")


def _schemas(body: Mapping[str, Any]) -> Iterator[AnswerForm]:
    given = {name: body.get(name) for name in FORMATS}
    for name in OPTIONS:
        options = body.get(name)
        given[f"{name}.format"] = options.get("format") if isinstance(options, dict) else None
    for field, value in given.items():
        if value and (form := read_as(value, _Format, field)).type != "text":
            schema = form.schema or (form.json_schema or {}).get("schema")
            yield AnswerForm(field, schema if isinstance(schema, dict) else OBJECT)
