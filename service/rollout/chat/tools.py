"""Tool calls in a response, in the format of Qwen's, Hermes' and many other chat templates.

    <tool_call>
    {"name": "search", "arguments": {"query": "marn"}}
    </tool_call>

One message of the role `tool` answers each call. A response without a call is the final answer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from service.rollout.environment import Message, StepResult, tagged

Tool = Callable[..., Awaitable[str]]


class ToolCall(NamedTuple):
    """One call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any]


class BadCall(NamedTuple):
    """A malformed call; the reason can be shown to the policy."""

    reason: str


def tool_calls(text: str) -> list[ToolCall | BadCall]:
    """Every call in a response, in order."""
    return [read_call(found[1]) for found in tagged(text, "tool_call")]


def read_call(written: str) -> ToolCall | BadCall:
    """The call between two tags."""
    try:
        call = json.loads(written)
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits is no JSONDecodeError
        return BadCall(f"the call is no JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return BadCall('give {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return BadCall("arguments is an object with a value for each name")
    return ToolCall(call["name"], arguments)


async def answer(calls: Sequence[ToolCall | BadCall], tools: Mapping[str, Tool]) -> StepResult:
    """The tools' answers to the calls; a call that cannot be made is answered with the reason."""
    answers = [Message(role="tool", content=await _answer(call, tools)) for call in calls]
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
