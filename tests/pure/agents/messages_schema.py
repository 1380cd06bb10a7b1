"""What the Anthropic SDK reads of an answer, field by field, for environments without that SDK."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import Struct


class _Exact(Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


class Text(_Exact, tag="text"):
    text: str


class Thinking(_Exact, tag="thinking"):
    thinking: str
    signature: str


class ToolUse(_Exact, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class Usage(Struct, forbid_unknown_fields=True):
    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class Message(_Exact, tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[Text | Thinking | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"] | None
    stop_sequence: None
    usage: Usage


class MessageStart(_Exact, tag="message_start"):
    message: Message


class BlockStart(_Exact, tag="content_block_start"):
    index: int
    content_block: Text | Thinking | ToolUse


class TextDelta(_Exact, tag="text_delta"):
    text: str


class ThinkingDelta(_Exact, tag="thinking_delta"):
    thinking: str


class SignatureDelta(_Exact, tag="signature_delta"):
    signature: str


class InputDelta(_Exact, tag="input_json_delta"):
    partial_json: str


class BlockDelta(_Exact, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(_Exact, tag="content_block_stop"):
    index: int


class Stop(Struct, forbid_unknown_fields=True):
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"]
    stop_sequence: None


class MessageDelta(_Exact, tag="message_delta"):
    delta: Stop
    usage: Usage


class MessageStop(_Exact, tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def check_message(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks of a message, each with the fields that the SDK needs."""
    msgspec.convert(message, Message)
    blocks: list[dict[str, Any]] = message["content"]
    return blocks


def check_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream adds up to, as the SDK adds them."""
    for event in events:
        msgspec.convert(event, Event)  # type: ignore[call-overload]
    first, *middle, before, last = events
    assert (first["type"], before["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    written = ""
    for event in middle:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            written = ""
        elif event["type"] == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            written += delta.pop("partial_json", "")
            blocks[-1] |= {name: blocks[-1][name] + value for name, value in delta.items()}
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(written)
    return blocks
