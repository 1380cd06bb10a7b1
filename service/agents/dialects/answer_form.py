"""The form of the answer that a client asks for: JSON of a schema, or a call of one of the client's tools.

    response_format: {type: json_schema, json_schema: {schema: S}}      text that follows S
    text: {format: {type: json_schema, schema: S}}                      text that follows S, in the API Responses
    output_config: {format: {type: json_schema, schema: S}}             text that follows S, in the API Messages
    response_format: {type: json_object}                                text that is an object
    tool_choice: required, {type: any}                                  a call of any tool
    tool_choice: {type: function, function: {name: f}}                  a call of f

By default (`agents.structured`) the policy answers freely, so that a badly formed answer can be trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from service.agents.dialects.body import FORMATS, OPTIONS, CommonFields, Name, read_as
from service.agents.dialects.dialect import AnswerForm, Refused
from service.rollout.chat.chat import Tool

FORCES = ("required", "any", "function", "tool", "custom")
"""Kinds of `tool_choice` that force a call of a tool which the client runs."""
THINKING = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>\n\n"}
"""The part of xgrammar's structural tag that allows thinking before structured output."""
MAX_FORM_BYTES = 1 << 16
"""Maximum bytes of an enforced form as JSON. The time to compile a form grows with the square of its size; at this size
it is a few seconds."""


class _Format(Struct):
    type: Name
    schema: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None


class _Named(Struct):
    name: str | None = None


class _Choice(_Named):
    function: _Named | None = None


def forms_of(body: Mapping[str, Any], request: CommonFields, tools: Sequence[Tool]) -> tuple[AnswerForm, ...]:
    """The forms that a request demands of its answer, such as JSON of a schema; empty if the request demands none.

    Raises:
        Refused: a form cannot be read.
    """
    return *_forced(body.get("tool_choice"), request.choice, tools), *_schemas(body)


def structural_tag(form: AnswerForm) -> str:
    """A form in the format in which the engine takes it: as JSON of an xgrammar structural tag.

    Raises:
        Refused: the form is too large.
    """
    elements = [{"type": "optional", "content": THINKING}, form.grammar]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    if len(tag) > MAX_FORM_BYTES:
        raise Refused(400, form.field, f"a form of {len(tag)} bytes; at most {MAX_FORM_BYTES} are enforced")
    return tag


def _forced(choice: Any, kind: str, tools: Sequence[Tool]) -> Iterator[AnswerForm]:
    if kind in ("auto", "none"):
        return
    named = read_as(choice, _Choice, "tool_choice") if isinstance(choice, dict) else _Choice()
    name = (named.function or named).name
    functions = [tool["function"] for tool in tools if kind in FORCES and name in (None, tool["function"]["name"])]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "arguments": one["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    schema = {"type": "json_schema", "json_schema": {"anyOf": calls}}
    tag = {"type": "tag", "begin": "<tool_call>\n", "content": schema, "end": "\n</tool_call>"}
    yield AnswerForm("tool_choice", tag if calls else None)


def _schemas(body: Mapping[str, Any]) -> Iterator[AnswerForm]:
    given = {name: body.get(name) for name in FORMATS}
    for name in OPTIONS:
        options = body.get(name)
        given[f"{name}.format"] = options.get("format") if isinstance(options, dict) else None
    for field, value in given.items():
        if value and (form := read_as(value, _Format, field)).type != "text":
            schema = form.schema or (form.json_schema or {}).get("schema") or {"type": "object"}
            yield AnswerForm(
                field, {"type": "json_schema", "json_schema": schema} if isinstance(schema, dict) else None
            )
