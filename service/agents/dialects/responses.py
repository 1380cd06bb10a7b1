"""`/v1/responses`, the API of the OpenAI SDK and Codex. A request has the whole input, or names earlier items, or the
response before it, by ids of its session.

request   instructions, input (text or items), tools (functions, namespaces of them, custom ones), max_output_tokens
answer    output: reasoning with the call's name as encrypted_content, message, function_call or custom_tool_call
events    `created`; for each output item: added, its parts, done; finally `completed` or `incomplete`

here                                          in the conversation
reasoning, message, several function_calls    one message of the assistant
tool `spawn` of namespace `agents`            function `agents__spawn`; its calls are returned with the namespace
custom tool with free text                    function with one text argument `input`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import count
from typing import Any, ClassVar, Literal

from msgspec import Struct

from service.agents.conversation_tree import AgentCall
from service.agents.dialects.body import (
    CommonFields,
    Content,
    Function,
    Name,
    Positive,
    TextPart,
    call_request,
    own_tools,
    read_as,
    read_request,
    text_of,
)
from service.agents.dialects.dialect import CallAnswer, CallRequest, Dialect, Refused, frame, openai_error

EMPTY: Mapping[str, Mapping[str, Any]] = {
    "reasoning": {"content": []},
    "message": {"content": [], "status": "in_progress"},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": ""},
}
FREE_TEXT: dict[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
OURS = re.compile(r"(call_.+)_\d+")
"""Matches the id that Baton gave to a tool call. The ids of all calls of one answer begin with the same part."""

TOOLS = ("function", "custom", "namespace")
"""Types of tools that the client runs and describes."""


class _FunctionItem(Function, tag_field="type", tag="function"):
    pass


class _CustomTool(Struct, tag_field="type", tag="custom"):
    name: Name
    description: str | None = None

    parameters: ClassVar[dict[str, Any]] = FREE_TEXT


class _Namespace(Struct, tag_field="type", tag="namespace"):
    name: Name
    tools: list[_FunctionItem | _CustomTool]


class _MessageItem(Struct, tag_field="type", tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None


class _Reasoning(Struct, tag_field="type", tag="reasoning"):
    id: str | None = None
    summary: list[TextPart] | None = None
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class _Call(Struct, kw_only=True):
    call_id: Name
    name: Name
    namespace: str | None = None


class _FunctionCall(_Call, kw_only=True, tag_field="type", tag="function_call"):
    arguments: str


class _CustomCall(_Call, kw_only=True, tag_field="type", tag="custom_tool_call"):
    input: str


class _Output(Struct, tag_field="type", tag="function_call_output"):
    call_id: Name
    output: Content


class _CustomOutput(_Output, tag="custom_tool_call_output"):
    pass


Item = _MessageItem | _Reasoning | _FunctionCall | _CustomCall | _Output | _CustomOutput
ORDER: Mapping[type, int] = {_Reasoning: 0, _MessageItem: 1, _FunctionCall: 2, _CustomCall: 2}
"""The place of each kind of item in an answer: thinking first, then text, then calls."""


class _ResponsesRequest(CommonFields, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    prompt: None = None


def with_items(body: dict[str, Any], find: Callable[[str], AgentCall | None]) -> dict[str, Any]:
    """The request, with references to items replaced by the items. `find`: returns the session's call whose name is
    part of an id.

    Raises:
        Refused: the session has no item of this id.
    """

    @cache
    def items(call: AgentCall | None) -> dict[str, Any]:
        return {} if call is None else {one["id"]: one for one in _output(call, body.get("tools"))}

    def item(i: int, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("type") != "item_reference":
            return given
        of = str(given.get("id"))
        if (one := items(find(of)).get(of)) is not None:
            return one
        raise Refused(400, f"input[{i}]", "this session has no such item; send the items themselves (store: false)")

    if not isinstance(given := body.get("input"), list):
        return body
    return {**body, "input": [item(i, one) for i, one in enumerate(given)]}


def read(body: Mapping[str, Any]) -> CallRequest:
    """Read the request."""
    request = read_request(body, _ResponsesRequest)
    shape: Any = Item
    given = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    items: list[Item] = [read_as({"type": "message", **item}, shape, f"input[{i}]") for i, item in enumerate(given)]
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if not items:
        raise Refused(400, "input", "is empty")
    repeated = {"instructions": request.instructions, "metadata": request.metadata, "tools": request.tools or []}
    choice = {
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
    }
    return call_request(
        body,
        request,
        TOOLS,
        messages=[*system, *_messages(items)],
        tools=(Function(name, tool.description, tool.parameters) for name, (_, tool) in _tools(request.tools).items()),
        echoed=frozenset(_echoed(items)),
        max_tokens=request.max_output_tokens,
        continues=request.previous_response_id or "",
        repeated=repeated | choice | {"max_output_tokens": request.max_output_tokens},
    )


def reply(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    """The answer as a response object of the API Responses."""
    numbers, is_cut = answer.usage, answer.finish == "length"
    return {
        "id": f"resp_{answer.call.name}",
        "object": "response",
        "created_at": answer.created,
        "model": asked.model,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(answer.call, asked.repeated.get("tools")),
        **asked.repeated,
        "usage": {
            "input_tokens": numbers["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": numbers["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": numbers["total_tokens"],
        },
    }


def events(answer: CallAnswer, asked: CallRequest) -> Iterator[bytes]:
    """The answer as the events of a streamed response."""
    numbers = count()

    def event(kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        return frame({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    whole = reply(answer, asked)
    yield event("created", response={**whole, "status": "in_progress", "incomplete_details": None, "output": []})
    for index, item in enumerate(whole["output"]):
        empty = EMPTY[item["type"]]
        yield event("output_item.added", output_index=index, item={**item, **empty})
        at = {"item_id": item["id"], "output_index": index}
        for part in item.get("content", ()):
            kind, at = part["type"], at | {"content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
            yield event("content_part.added", **at, part={**part, "text": ""})
            yield event(f"{kind}.delta", **at, delta=part["text"], **more)
            yield event(f"{kind}.done", **at, text=part["text"], **more)
            yield event("content_part.done", **at, part=part)
        if item["type"] == "function_call":
            written = item["arguments"]
            yield event("function_call_arguments.delta", **at, delta=written)
            yield event("function_call_arguments.done", **at, name=item["name"], arguments=written)
        elif item["type"] == "custom_tool_call":
            yield event("custom_tool_call_input.delta", **at, delta=item["input"])
            yield event("custom_tool_call_input.done", **at, input=item["input"])
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)


def error_event(refused: Refused) -> bytes:
    """The events that end a failed stream: OpenAI's SDK reads the first one, Codex the second."""
    told = openai_error(refused)["error"]
    first = {"type": "error", "sequence_number": 0, **told, "error": told}
    response = {"object": "response", "status": "failed", "output": [], "error": told}
    second = {"type": "response.failed", "sequence_number": 1, "response": response}
    return frame(first | {"type": "error"}, "error") + frame(second, "response.failed")


def _echoed(items: Iterable[Item]) -> Iterator[str]:
    """Names of the calls that the client sent back, from items' ids or encrypted content: some clients keep only one of
    them."""
    for item in items:
        if isinstance(item, _MessageItem | _Reasoning) and item.id:
            yield item.id.partition("_")[2]
        if isinstance(item, _Reasoning) and item.encrypted_content:
            yield item.encrypted_content


def _messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The items as messages; all items of one answer become one message."""
    messages: list[dict[str, Any]] = []
    before: Item | None = None
    said: dict[str, Any] = {"role": None}
    """The newest message that is not a tool's answer."""
    for item in items:
        message = _message(item)
        if said["role"] == message["role"] == "assistant" and _is_part(item, said, before):
            said["content"] += message.pop("content")
            said.setdefault("tool_calls", []).extend(message.pop("tool_calls", ()))
            said |= message
        else:
            messages.append(message)
            said = said if message["role"] == "tool" else message
        before = item
    return messages


def _is_part(item: Item, said: Mapping[str, Any], before: Item | None) -> bool:
    """Whether an item belongs to the answer `said`. `before`: the item before this item."""
    if type(before) in ORDER:
        first, second = ORDER[type(before)], ORDER[type(item)]
        calls = ORDER[_FunctionCall]
        is_late = first == calls and not said["content"]  # some clients send calls before the text (Haystack)
        return first < second or first == second == calls or is_late
    if not isinstance(item, _Call) or not said.get("tool_calls"):
        return False
    # A client may put a tool's answer between two calls of one answer.
    last, ours = OURS.fullmatch(said["tool_calls"][-1]["id"]), OURS.fullmatch(item.call_id)
    return last is not None and ours is not None and last[1] == ours[1]


def _message(item: Item) -> dict[str, Any]:
    if isinstance(item, _MessageItem):
        return {"role": item.role, "content": text_of(item.content)}
    if isinstance(item, _Reasoning):
        thinking = text_of(item.content) or text_of(item.summary)
        return {"role": "assistant", "content": "", "reasoning_content": thinking}
    if isinstance(item, _Output):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    arguments = {"input": item.input} if isinstance(item, _CustomCall) else item.arguments
    called = {"name": _flat(item.namespace, item.name), "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": item.call_id, "function": called}]}


def _flat(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _tools(tools: list[dict[str, Any]] | None) -> dict[str, tuple[str | None, _FunctionItem | _CustomTool]]:
    """The tools by the names that the policy sees, each with its namespace."""
    read: dict[str, tuple[str | None, _FunctionItem | _CustomTool]] = {}
    for one in own_tools(tools, _FunctionItem | _CustomTool | _Namespace, TOOLS):
        if isinstance(one, _Namespace):
            read |= {_flat(one.name, inner.name): (one.name, inner) for inner in one.tools}
        else:
            read[one.name] = (None, one)
    return read


def _output(call: AgentCall, given: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    tools, items = _tools(given), list[dict[str, Any]]()
    if call.reply.thinking:
        thought = {"content": [{"type": "reasoning_text", "text": call.reply.thinking}], "encrypted_content": call.name}
        items.append({"type": "reasoning", "id": f"rs_{call.name}", "summary": [], **thought})
    if call.reply.content or not call.reply.calls:
        part = {"type": "output_text", "text": call.reply.content, "annotations": []}
        head = {"type": "message", "id": f"msg_{call.name}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for of, (flat, arguments) in zip(call.ids, call.reply.calls, strict=True):
        space, tool = tools.get(flat, (None, Function(flat)))
        named = {"call_id": of, "name": tool.name, **({"namespace": space} if space else {})}
        given = arguments.get("input")
        if isinstance(tool, _CustomTool) and isinstance(given, str) and len(arguments) == 1:
            items.append({"type": "custom_tool_call", "id": f"ctc_{of}", **named, "input": given})
        else:
            written = {"arguments": json.dumps(arguments), "status": "completed"}
            items.append({"type": "function_call", "id": f"fc_{of}", **named, **written})
    return items


RESPONSES = Dialect("responses", read, reply, events, error_event=error_event)
