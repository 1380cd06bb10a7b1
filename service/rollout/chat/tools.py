"""Reads tool calls from a response, in the format of Qwen, Hermes and many other models.

    <tool_call>
    {"name": "search", "arguments": {"query": "marn"}}
    </tool_call>

Each call is answered by one message of the role `tool`. A response without a call is the final answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from service.rollout.environment import Message, StepResult, tagged
from service.rollout.exact_json import exact_json

Tool = Callable[..., Awaitable[str]]

MAX_DEPTH = 64
"""Maximum depth of nested objects and lists in a call. Code that writes, compares or renders deeper values may fail."""


class ToolCall(NamedTuple):
    """A tool call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]


class BadCall(NamedTuple):
    """A malformed tool call, with a reason that can be shown to the policy."""

    reason: str


def tool_calls(text: str) -> list[ToolCall | BadCall]:
    """All tool calls in a response, in order."""
    return [read_call(found[1]) for found in tagged(text, "tool_call")]


def read_call(written: str) -> ToolCall | BadCall:
    """Parse the text between `<tool_call>` and `</tool_call>`."""
    try:
        call = read_json(written)
    except ValueError as error:
        return BadCall(f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        return BadCall('give {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return BadCall("arguments is an object with a value for each name")
    return ToolCall(name, arguments)


def read_json(written: str | bytes) -> Any:
    """Parse a JSON value that every program can read: exactly (`exact_json`), without half of a surrogate pair, and of
    a bounded depth.

    Raises:
        ValueError: the text is not such a value.
    """
    try:
        value = exact_json(written, keeps_half=False)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if not is_shallow(value):
        raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep")
    return value


def is_shallow(value: Any) -> bool:
    """True if a JSON value nests objects and lists at most `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        outer = [one for one in level if isinstance(one, dict | list)]
        level = [inner for one in outer for inner in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return True
    return False


async def tool_answer(calls: Sequence[ToolCall | BadCall], tools: Mapping[str, Tool]) -> StepResult:
    """Call the tools and return their answers; a call that cannot be made gets an error message as its answer."""
    answers = [Message(role="tool", content=await _answer(call, tools)) for call in calls]
    for answer, call in zip(answers, calls, strict=True):
        answer |= {"name": call.name} if isinstance(call, ToolCall) else {}  # some templates show it
    bad = sum(message["content"].startswith("error: ") for message in answers)
    return StepResult(answers, 0.0, False, {"tool_calls": float(len(calls)), "bad_tool_calls": float(bad)})


async def _answer(call: ToolCall | BadCall, tools: Mapping[str, Tool]) -> str:
    if isinstance(call, BadCall):
        return f"error: {call.reason}"
    if call.name not in tools:
        return f"error: there is no tool {call.name!r}, only {', '.join(sorted(tools))}"
    tool = tools[call.name]
    try:
        inspect.signature(tool).bind(**call.arguments)
    except TypeError as error:
        return f"error: {call.name}: {error}"
    return await tool(**call.arguments)
