"""A normal form of clients' messages, in which equal conversations compare equal.

    a dialect's message                 here
    arguments: '{"b": 1.0, "a":2}'      arguments: {"b": 1, "a": 2}
    role: developer                     role: system

The form is that of chat completions, without ids of calls and without unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import xxhash

from service.rollout.chat.tools import is_shallow
from service.rollout.environment import Message


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in normal form; the dialects have checked their fields."""
    return [_read(message) for message in messages]


def echoed_ids(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The ids of tool calls that a client sends back, in calls and in tool answers."""
    for message in messages:
        yield from (call["id"] for call in message.get("tool_calls") or () if isinstance(call.get("id"), str))
        if isinstance(answered := message.get("tool_call_id"), str):
            yield answered


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Digests of all prefixes of the conversation, from no message to all messages.

    An assistant's thinking, spaces around its text, and the way in which arguments are written do not change a digest.
    """
    found = [xxhash.xxh3_128_digest(_json(list(tools)))]
    for message in messages:
        found.append(extended(found[-1], message))
    return found


def extended(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message."""
    role, content = message["role"], message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]  # type: ignore[attr-defined]
    said = content.strip() if role == "assistant" else content
    # Lengths in front make the bytes unambiguous; JSON of a long text takes ten times as long.
    text = f"{len(role)}:{role}{len(said)}:{said}".encode(errors="surrogatepass")
    return xxhash.xxh3_128_digest(digest + text + (_json(calls) if calls else b""))


def _read(message: Mapping[str, Any]) -> Message:
    role = "system" if message["role"] == "developer" else message["role"]
    read: dict[str, Any] = {"role": role, "content": message["content"]}
    if calls := message.get("tool_calls"):
        functions = [call["function"] for call in calls]
        read["tool_calls"] = [
            {"type": "function", "function": {"name": of["name"], "arguments": _arguments(of["arguments"])}}
            for of in functions
        ]
    if thinking := message.get("reasoning_content"):
        read["reasoning_content"] = thinking
    return cast(Message, read)


def _arguments(arguments: str | Mapping[str, Any]) -> Any:
    """The arguments as values, or as text if they are not JSON."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        read = json.loads(written, parse_float=_number)
    except (ValueError, RecursionError):
        return written
    return read if is_shallow(read) else written


def _number(written: str) -> float | int:
    """A JSON number; integral floats become integers, because clients with one number type send 1 for 1.0."""
    value = float(written)
    return int(value) if value.is_integer() else value


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode(errors="surrogatepass")
