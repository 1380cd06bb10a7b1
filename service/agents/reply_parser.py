"""Parses a response into text, thinking and tool calls.

<think>look it up</think>Let me see.<tool_call>{"name": "search", "arguments": {"query": "marn"}}</tool_call>

content "Let me see."   thinking "look it up"   calls (search with {"query": "marn"})
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from service.rollout.chat.chat import Tool
from service.rollout.chat.tools import ToolCall, read_call
from service.rollout.environment import tagged

THINK, THOUGHT = "<think>", "</think>"


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
        """Parse a response; a malformed or truncated call stays in the content as the policy wrote it."""
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
    """Split thinking from the rest; the prompt may have opened the thinking, and a truncated response may not close
    it."""
    before, closed, after = text.partition(THOUGHT)
    opened = before.lstrip().startswith(THINK)
    if not closed and not opened:
        return "", text
    return before.lstrip().removeprefix(THINK).strip(), after
