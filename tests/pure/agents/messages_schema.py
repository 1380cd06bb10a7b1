"""What the Anthropic SDK reads of an answer, field by field, for environments without that SDK."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec


def exact(tag: str | None = None, **fields: Any) -> Any:
    """A struct with these fields and no others; with a tag also `type`."""
    kind = {} if tag is None else {"tag_field": "type", "tag": tag}
    return msgspec.defstruct(tag or "Part", [*fields.items()], forbid_unknown_fields=True, **kind)  # type: ignore[arg-type]


STOP = Literal["end_turn", "max_tokens", "tool_use"]
COUNTS = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
USAGE = exact(**dict.fromkeys(COUNTS, int))
BLOCK = (
    exact("text", text=str)
    | exact("thinking", thinking=str, signature=str)
    | exact("tool_use", id=str, name=str, input=dict[str, Any])
)
MESSAGE = exact(
    "message",
    id=str,
    role=Literal["assistant"],
    model=str,
    content=list[BLOCK],
    stop_reason=STOP | None,
    stop_sequence=None,
    usage=USAGE,
)
DELTA = (
    exact("text_delta", text=str)
    | exact("thinking_delta", thinking=str)
    | exact("signature_delta", signature=str)
    | exact("input_json_delta", partial_json=str)
)
EVENT = (
    exact("message_start", message=MESSAGE)
    | exact("content_block_start", index=int, content_block=BLOCK)
    | exact("content_block_delta", index=int, delta=DELTA)
    | exact("content_block_stop", index=int)
    | exact("message_delta", delta=exact(stop_reason=STOP, stop_sequence=None), usage=USAGE)
    | exact("message_stop")
)


def check_message(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The blocks of a message, each with the fields that the SDK needs."""
    msgspec.convert(message, MESSAGE)
    blocks: list[dict[str, Any]] = message["content"]
    return blocks


def check_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream adds up to, as the SDK adds them."""
    for event in events:
        msgspec.convert(event, EVENT)
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
