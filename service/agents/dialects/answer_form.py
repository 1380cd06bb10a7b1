"""Fields by which a client prescribes the form of its answer: JSON of a schema, or a call of one of its tools.

    response_format, output_format: {type: json_schema, json_schema: {schema: S}}
    text, output_config: {format: {type: json_schema, schema: S}}
    tool_choice: required, {type: any}, {type: function, function: {name: f}}

The policy answers freely, so that a badly formed answer can be trained on; see `agents.structured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from service.agents.dialects.body import FORMATS, OPTIONS, CommonFields, Name, read_as


class _Format(Struct):
    type: Name


def forms_of(body: Mapping[str, Any], request: CommonFields) -> tuple[str, ...]:
    """The fields with which a request prescribes the form of its answer.

    Raises:
        Refused: a form cannot be read.
    """
    given = {name: body.get(name) for name in FORMATS}
    for name in OPTIONS:
        options = body.get(name)
        given[f"{name}.format"] = options.get("format") if isinstance(options, dict) else None
    forced = () if request.choice in ("auto", "none") else ("tool_choice",)
    return *forced, *(
        field for field, value in given.items() if value and read_as(value, _Format, field).type != "text"
    )
