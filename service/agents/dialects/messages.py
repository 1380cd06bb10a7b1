"""`/v1/messages` and its `count_tokens`, the API of the Anthropic SDK.

request   system, messages of blocks, tools with input_schema, max_tokens
answer    content: thinking with the call's name as signature, text, tool_use
events    message_start - of each block start, deltas, stop - message_delta - message_stop

user: [tool_result 17, tool_result 18, text "go on"]   becomes   tool 17, tool 18, user "go on"
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from service.agents.dialects.body import (
    NO_THREAD,
    CommonFields,
    Content,
    Function,
    Name,
    Positive,
    ToolChoice,
    call_request,
    own_tools,
    read_request,
    taken_begun,
    text_of,
)
from service.agents.dialects.dialect import ERROR_TYPES, CallAnswer, CallRequest, Dialect, Refused, frame

KINDS = ERROR_TYPES | {413: "request_too_large"}
"""Types of errors, by HTTP status."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
EMPTY: Mapping[str, Mapping[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}

TOOLS = ("custom",)
"""Types of tools that the client runs and describes."""


class _Text(Struct, tag_field="type", tag="text"):
    text: str


class _Thinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class _ToolUse(Struct, tag_field="type", tag="tool_use"):
    id: Name
    name: Name
    input: dict[str, Any]


class _ToolResult(Struct, tag_field="type", tag="tool_result"):
    tool_use_id: Name
    content: Content = None
    is_error: bool | None = None


Block = _Text | _Thinking | _ToolUse | _ToolResult


class _MessageOfBlocks(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class _MessagesTool(Function, kw_only=True):
    parameters: dict[str, Any] = field(name="input_schema")
    type: Literal["custom"] | None = None


class _MessagesRequest(CommonFields, kw_only=True):
    messages: Annotated[list[_MessageOfBlocks], Meta(min_length=1)]
    max_tokens: Positive | None = None
    system: Content = None


def read(body: Mapping[str, Any]) -> CallRequest:
    """Read a request for an answer."""
    asked = read_to_count(body)
    if asked.max_tokens is None:
        raise Refused(400, "max_tokens", "is required")
    return asked


def read_to_count(body: Mapping[str, Any]) -> CallRequest:
    """Read a request for a token count."""
    request = read_request(body, _MessagesRequest)
    system = [{"role": "system", "content": text_of(request.system)}] if request.system else []
    blocks = [block for message in request.messages for block in _blocks(message)]
    messages = [*system, *(read for message in request.messages for read in _read(message))]
    begun = taken_begun(messages, request.messages[-1].role == "assistant")
    asked = call_request(
        body,
        request,
        TOOLS,
        messages=messages,
        begun=begun,
        tools=own_tools(request.tools, _MessagesTool, TOOLS),
        echoed=frozenset(block.signature for block in blocks if isinstance(block, _Thinking) and block.signature),
        max_tokens=request.max_tokens,
    )
    choice = request.tool_choice
    inner = {
        "messages.content.is_error": any(isinstance(block, _ToolResult) and block.is_error for block in blocks),
        "tool_choice.disable_parallel_tool_use": isinstance(choice, ToolChoice) and choice.disable_parallel_tool_use,
    }
    return asked._replace(ignored=(*asked.ignored, *(name for name, is_given in inner.items() if is_given)))


def reply(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    """The answer as a message object of the API Messages."""
    call = answer.call
    blocks: list[dict[str, Any]] = []
    if call.reply.thinking:
        blocks.append({"type": "thinking", "thinking": call.reply.thinking, "signature": call.name})
    if call.reply.content or not call.reply.calls:
        blocks.append({"type": "text", "text": call.reply.content})
    blocks += [
        {"type": "tool_use", "id": of, "name": name, "input": dict(arguments)}
        for of, (name, arguments) in zip(call.ids, call.reply.calls, strict=True)
    ]
    return {
        "id": f"msg_{call.name}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": blocks,
        "stop_reason": STOP_REASONS[answer.finish],
        "stop_sequence": None,
        "usage": {
            "input_tokens": answer.call.n_prompt,
            "output_tokens": answer.call.n_sampled,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def events(answer: CallAnswer, asked: CallRequest) -> Iterator[bytes]:
    """The answer as the events of a streamed message."""

    def event(kind: str, **fields: Any) -> bytes:
        return frame({"type": kind, **fields}, kind)

    whole = reply(answer, asked)
    begun = whole | {"content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        yield event("content_block_start", index=index, content_block={**block, **EMPTY[block["type"]]})
        for delta in _deltas(block):
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=stop, usage=whole["usage"])
    yield event("message_stop")


def error(refused: Refused) -> dict[str, Any]:
    """The body of an error response of the Messages API."""
    kind = KINDS.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
    details = {"error_code": refused.code, "unsupported": [refused.field]} if refused.code == NO_THREAD else None
    return {"type": "error", "error": {"type": kind, "message": str(refused), "details": details}}


def error_event(refused: Refused) -> bytes:
    """The error event that ends a failed stream."""
    return frame(error(refused), "error")


def _read(message: _MessageOfBlocks) -> Iterator[dict[str, Any]]:
    """Convert one message to messages of chat completions. Each tool result in a user's message becomes one message."""
    blocks = _blocks(message)
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    said: list[str] = []
    for block in blocks:
        if isinstance(block, _Text):
            said.append(block.text)
        elif isinstance(block, _ToolResult):
            if said:
                yield {"role": message.role, "content": "".join(said)}
                said = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
        else:
            raise Refused(400, "messages", f"a message of the {message.role} has no thinking and no tool_use")
    if said or not blocks:
        yield {"role": message.role, "content": "".join(said)}


def _blocks(message: _MessageOfBlocks) -> list[Block]:
    return [_Text(message.content)] if isinstance(message.content, str) else message.content


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    text = "".join(block.text for block in blocks if isinstance(block, _Text))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, _Thinking))
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, _ToolUse)
    ]
    return {"role": "assistant", "content": text, "reasoning_content": thinking, "tool_calls": calls}


def _deltas(block: Mapping[str, Any]) -> list[dict[str, str]]:
    if block["type"] == "text":
        return [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    signature = {"type": "signature_delta", "signature": block["signature"]}
    return [{"type": "thinking_delta", "thinking": block["thinking"]}, signature]


MESSAGES = Dialect("messages", read, reply, events, error, error_event)
