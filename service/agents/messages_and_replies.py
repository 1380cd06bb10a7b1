"""Converts clients' messages to a normal form, so that equal conversations compare equal; and parses responses.

    a dialect's message                 here
    arguments: '{"b": 1.0, "a":2}'      arguments: {"b": 1, "a": 2}
    role: developer                     role: system

The normal form is the form of chat completions, without unknown fields. Ids of calls, and names in their answers, are
not compared.

<think>look it up</think>Let me see.<tool_call>{"name": "search", "arguments": {"query": "marn"}}</tool_call>
    content "Let me see."   thinking "look it up"   calls (search with {"query": "marn"})
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import xxhash

from service.rollout.chat.chat import Tool
from service.rollout.chat.tool_form import with_names
from service.rollout.chat.tools import ToolCall, is_shallow, read_call
from service.rollout.environment import Message, tagged
from service.rollout.exact_json import InexactJson, exact_json

EXACT, LARGEST = 1 << 53, 1 << 1023
"""The largest integer up to which a double holds all integers exactly, and the largest that it holds at all."""
THINK, THOUGHT = "<think>", "</think>"


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in normal form. (The dialects have checked their fields.) A tool's answer gets the name of its
    call."""
    return list(with_names([_read(message) for message in messages]))


def echoed_ids(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The ids of tool calls that a client sends back, in calls and in tool answers."""
    for message in messages:
        yield from (call["id"] for call in message.get("tool_calls") or () if isinstance(call.get("id"), str))
        if isinstance(answered := message.get("tool_call_id"), str):
            yield answered


def digests(messages: Sequence[Message], tools: Sequence[Any]) -> list[bytes]:
    """Digests of all prefixes of the conversation, from no message to all messages.

    A digest does not depend on the assistant's thinking, on spaces around its text, on how arguments are written, or on
    the order and descriptions of tools.
    """
    found = [xxhash.xxh3_128_digest(b"".join(sorted(_json(_compared(tool, "description")) for tool in tools)))]
    for message in messages:
        found.append(extended(found[-1], message))
    return found


def extended(digest: bytes, message: Message) -> bytes:
    """The digest of a conversation with one more message."""
    role, content = message["role"], message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = content.strip() if role == "assistant" else content
    # A length before each text makes the bytes unambiguous. JSON of a long text would take ten times as long.
    text = f"{len(role)}:{role}{len(said)}:{said}".encode(errors="surrogatepass")
    return xxhash.xxh3_128_digest(digest + text + (_json(_compared(calls)) if calls else b""))


def _read(message: Mapping[str, Any]) -> Message:
    read: dict[str, Any] = {
        "role": "system" if message["role"] == "developer" else message["role"],
        "content": message["content"],
    }
    for field in ("tool_call_id", "name", "reasoning_content"):
        if of := message.get(field):
            read[field] = of
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [
            {
                **({"id": of["id"]} if of.get("id") else {}),
                "type": "function",
                "function": {"name": of["function"]["name"], "arguments": _arguments(of["function"]["arguments"])},
            }
            for of in calls
        ]
    return cast(Message, read)


def _arguments(arguments: str | Mapping[str, Any]) -> Any:
    """The arguments as values, or as text if they are not JSON; raises `InexactJson`."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        exact_json(written, field="arguments")
        read = json.loads(written, parse_float=_number)
    except InexactJson:
        raise
    except (ValueError, RecursionError):
        return written
    return read if is_shallow(read) else written


def _number(written: str) -> float | int:
    """A JSON number. 1.0 becomes 1: clients that have only one type of number send 1 for 1.0."""
    value = float(written)
    return int(value) if value.is_integer() else value


def _compared(value: Any, left_out: str = "") -> Any:
    """The parts of calls or tools that are compared: texts of the name `left_out` are dropped. Large integers are
    rounded to doubles, as by clients that have only this type of number."""
    if isinstance(value, Mapping):
        kept = {name: of for name, of in value.items() if name != left_out or not isinstance(of, str)}
        return {name: _compared(of, left_out) for name, of in kept.items()}
    if isinstance(value, list):
        return [_compared(of, left_out) for of in value]
    return int(float(value)) if type(value) is int and EXACT < abs(value) < LARGEST else value


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode(errors="surrogatepass")


class Reply(NamedTuple):
    """A parsed response, as clients receive it: text, thinking and tool calls."""

    content: str
    thinking: str
    calls: tuple[ToolCall, ...]


class ReplyParser(Protocol):
    """Parses the responses of one family of models."""

    def parse(self, text: str, tools: Sequence[Tool] = (), token_ids: Sequence[int] = ()) -> Reply:
        """Parse a finished response to a request with these `tools`.

        Text that is not recognised becomes content. If the request has no tools, tool calls become content too.

        `text`: the response without special tokens; `token_ids`: the response with all tokens, for parsers of models
        whose tool calls are marked by special tokens.
        """


class JsonCalls:
    """Parses responses of Qwen's and Hermes' models: calls are JSON between tags, and thinking comes first."""

    def parse(self, text: str, tools: Sequence[Tool] = (), token_ids: Sequence[int] = ()) -> Reply:
        """Parse a response. A malformed or truncated call stays in the content as the policy wrote it."""
        thinking, rest = _thinking(text)
        calls, content, end = [], [], 0
        for found in tagged(rest, "tool_call") if tools else ():
            if isinstance(call := read_call(found[1]), ToolCall):
                calls.append(call)
                content.append(rest[end : found.start()])
                end = found.end()
        content.append(rest[end:])
        return Reply("".join(content).strip(), thinking, tuple(calls))


def _thinking(text: str) -> tuple[str, str]:
    """Split thinking from the rest. The prompt may have opened the thinking, and a truncated response may leave it
    open."""
    before, closed, after = text.partition(THOUGHT)
    opened = before.lstrip().startswith(THINK)
    if not closed and not opened:
        return "", text
    return before.lstrip().removeprefix(THINK).strip(), after
