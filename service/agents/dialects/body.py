"""Reads request bodies: parses the JSON object, checks its schema, and names the wrong field in a refusal.

    {"messages": [{"role": "user", "content": 5}]}   400   messages[0].content: Expected `str | array | null`, got `int`
    {"messages": [...], "logit_bias": {"5": 1}}      400   logit_bias: what is sampled is the trained distribution
    {"messages": [...], "seed": 5, "x": 1}           read; `seed` and `x` change nothing, and the answer names them

A schema is a struct. A field that the struct lacks has no effect; a field in `REFUSED` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from service.agents.dialects.dialect import CallRequest, Refused
from service.rollout.chat.chat import Tool
from service.rollout.chat.tools import read_json
from service.rollout.exact_json import InexactJson, exact_json

HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""A JSON escape of half a surrogate pair. Programs send halves if they cut a text in the middle of a character."""
WHERE = re.compile(r"(?P<reason>.*?)(?: - at `\$\.?(?P<field>.*)`)?", re.DOTALL)
FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""Names of fields that may be written to a header and a log unchanged."""
FORMATS, OPTIONS = ("response_format", "output_format"), ("text", "output_config")
"""Fields that prescribe the form of an answer; and fields whose option `format` may prescribe it."""
GUIDED = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields with which clients of vLLM prescribe the form of an answer."""
MAX_NAMED = 32
"""Maximum number of ignored fields that an answer names."""
MISSING = re.compile(r"required field `(\w+)`")
Shape = TypeVar("Shape", bound=Struct)
Positive = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)]


class TextPart(Struct):
    """One part of a message's content; only text is accepted."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


Content = str | list[TextPart] | None


class ToolChoice(Struct):
    """The field `tool_choice` if it is an object."""

    type: Name
    disable_parallel_tool_use: bool | None = None
    """Only in `messages`."""


class Truncation(Struct, kw_only=True):
    """Fields with which a request truncates the distribution from which tokens are sampled."""

    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1: all tokens."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None

    @property
    def truncation(self) -> dict[str, Any]:
        """The fields that the request has, by their names in `Sampling`."""
        given = {"top_p": self.top_p, "top_k": self.top_k and max(self.top_k, 0), "min_p": self.min_p}
        return {name: value for name, value in given.items() if value is not None}


class CommonFields(Truncation, kw_only=True):
    """Fields that requests of all dialects except `generate` share."""

    model: str | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required", "any"] | ToolChoice | None = None

    @property
    def choice(self) -> str:
        """The kind of `tool_choice`: `auto`, `none`, or a kind that forces a call."""
        return self.tool_choice.type if isinstance(self.tool_choice, ToolChoice) else self.tool_choice or "auto"


class Function(Struct):
    """A tool of a client."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Format(Struct):
    type: Name


class _Unless(NamedTuple):
    """The rule for a field of a request: only the `neutral` values are allowed."""

    neutral: tuple[Any, ...]
    reason: str
    code: str | None = None
    """An error code that makes clients send the request again without the field; None: no code does."""


ONE = _Unless((1,), "one call gives one answer")
SAMPLED = _Unless(({}, []), "the sampled distribution must be the trained one")
PENALTY = _Unless((0, 0.0), SAMPLED.reason)
WHOLE = _Unless((), "send the whole conversation: its messages select its tokens")
NO_THREAD = "thread_unsupported_request"
"""An error code for a request that names a stored conversation. It makes Anthropic's SDK send the whole
conversation."""
REFUSED: Mapping[str, _Unless] = {
    "n": ONE,
    "use_beam_search": _Unless((False,), "answers are sampled"),
    "logit_bias": SAMPLED,
    "allowed_token_ids": SAMPLED,
    "bad_words": SAMPLED,
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": PENALTY._replace(neutral=(1, 1.0)),
    "previous_response_id": WHOLE._replace(code="previous_response_not_found"),
    "conversation": WHOLE,
    "thread": WHOLE._replace(code=NO_THREAD),
    "background": _Unless((False,), "the answer comes in the same request"),
    "functions": _Unless(([],), "use tools"),
    "modalities": _Unless((["text"],), "answers are text"),
    "audio": _Unless((), "answers are text"),
    "mcp_servers": _Unless(([],), "no tool runs here"),
}


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request as an exact JSON object without half surrogate pairs or deep nesting.

    Raises:
        Refused: the body is not such an object.
    """
    try:
        if HALF.search(raw):
            raw = json.dumps(exact_json(raw), ensure_ascii=False).encode(errors="replace")
        body = read_json(raw)
    except InexactJson as error:
        raise Refused(400, error.field or None, error.reason) from error
    except (ValueError, RecursionError) as error:  # also raised if bytes are not UTF-8
        raise Refused(400, None, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, None, "the body is no JSON object")
    return body


def read_request(body: Mapping[str, Any], shape: type[Shape], where: str = "") -> Shape:
    """Convert a request to the struct class `shape`, which is the schema; `where`: the request's path in the body.

    Raises:
        Refused: the request does not follow the schema, or a field in `REFUSED` has a value that would have an effect.
    """
    request = read_as(body, shape, where)
    given = {name: value for name, value in body.items() if value is not None}
    for name in (given.keys() & REFUSED.keys()).difference(shape.__struct_fields__):
        neutral, reason, code = REFUSED[name]
        if not any(given[name] == one and type(given[name]) is type(one) for one in neutral):
            raise Refused(400, f"{where}.{name}" if where else name, reason, code)
    return request


def call_request(
    body: Mapping[str, Any], request: CommonFields, kinds: Collection[str], tools: Iterable[Function], **own: Any
) -> CallRequest:
    """The request of a client. It has the fields of all dialects, its `tools`, and the dialect's `own` fields. `kinds`:
    types of tools that the client runs and describes."""
    return CallRequest(
        tools=list(map(_template_form, tools)),
        stream=bool(request.stream),
        may_call=request.choice != "none",
        forms=_forms_of(body, request),
        truncation=request.truncation,
        ignored=ignored_fields(body, type(request), kinds),
        **own,
    )


def ignored_fields(body: Mapping[str, Any], shape: type[Struct], tools: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the request's fields that have no effect, in order: the fields that the schema lacks. If `tools` is
    not empty, also the tools whose type is not in `tools`."""
    read = {*shape.__struct_fields__, *REFUSED, *FORMATS}
    names = (
        f"{name}.{inner}" if inner else name
        for name, value in body.items()
        if value is not None and name not in read
        for inner in (value if name in OPTIONS and isinstance(value, dict) else ("",))
        if inner != "format"
    )
    offered = body.get("tools") if tools else None
    left_out = (f"tools.{tool['type']}" for tool in offered or () if _is_left_out(tool, tools))
    return tuple(islice(filter(FIELD_NAME.fullmatch, chain(names, left_out)), MAX_NAMED))


def _forms_of(body: Mapping[str, Any], request: CommonFields) -> tuple[str, ...]:
    """The fields that prescribe the form of the answer: JSON of a schema, or a call of a tool. The policy still answers
    freely, so that training can correct badly formed answers; see `agents.structured`.

    Raises:
        Refused: a form cannot be read.
    """
    given = {name: body.get(name) for name in FORMATS}
    for name in OPTIONS:
        options = body.get(name)
        given[f"{name}.format"] = options.get("format") if isinstance(options, dict) else None
    forced = () if request.choice in ("auto", "none") else ("tool_choice",)
    formats = (field for field, value in given.items() if value and read_as(value, _Format, field).type != "text")
    return *forced, *formats, *guided(body)


def guided(body: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields in `GUIDED` that a request has."""
    return tuple(name for name in GUIDED if body.get(name) is not None)


def read_as(value: Any, shape: type[Shape], where: str = "") -> Shape:
    """Convert a value to the struct class `shape`, which is the schema; `where`: the value's path in the body.

    Raises:
        Refused: the value does not follow the schema.
    """
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        found = WHERE.fullmatch(str(error))
        reason, at = (found["reason"], found["field"] or "") if found else (str(error), "")
        missing = MISSING.search(reason)
        if "content[" in at and at.endswith(".type"):
            reason += "; content is text, without images and files"
        field = ".".join(name for name in (where, at, missing[1] if missing else "") if name)
        raise Refused(400, field.replace(".[", "[") or None, reason) from error


def own_tools(tools: list[dict[str, Any]] | None, shape: Any, kinds: Collection[str]) -> Iterator[Any]:
    """Convert the tools whose type is in `kinds`, or that have no type, to the schema `shape`.

    Tools that a provider of models runs or describes itself are left out. A refusal would stop agents that always offer
    such a tool.
    """
    for i, tool in enumerate(tools or ()):
        if not _is_left_out(tool, kinds):
            yield read_as(tool, shape, f"tools[{i}]")


def _is_left_out(tool: Mapping[str, Any], kinds: Collection[str]) -> bool:
    return isinstance(kind := tool.get("type"), str) and kind not in kinds


def _template_form(tool: Function) -> Tool:
    """A tool in the form of chat templates, the same for every dialect."""
    told = {} if tool.description is None else {"description": tool.description}
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool.name, **told, "parameters": parameters}}


def taken_begun(messages: list[dict[str, Any]], continues: bool) -> str:
    """If a request `continues` its last message, remove this message and return its text: the answer begins with it.

    Raises:
        Refused: the message is not an assistant's, or contains more than text.
    """
    if not continues:
        return ""
    last = messages.pop()
    if last["role"] != "assistant" or any(of for name, of in last.items() if name not in ("role", "content")):
        raise Refused(400, f"messages[{len(messages)}]", "only an assistant's text can be continued")
    return str(last["content"])


def text_of(content: Content) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
