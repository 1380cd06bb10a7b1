"""Tool calls: what counts as one, and how each is answered."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from service.rollout.chat.tools import BadCall, ToolCall, tool_answer, tool_calls
from service.rollout.environment import tagged


def written(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{</tool_call>", "no JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "no JSON"),
        (f'<tool_call>{{"arguments": {"1" * 5000}}}</tool_call>', "no JSON"),
        (written([]), "give"),
        (written({"arguments": {}}), "give"),
        (written({"name": 3}), "give"),
        (written({"name": ""}), "give"),
        (written({"name": "search", "arguments": ["marn"]}), "arguments is an object"),
    ],
)
def test_what_is_no_call_is_told_why(text: str, reason: str) -> None:
    (call,) = tool_calls(text)
    assert isinstance(call, BadCall)
    assert reason in call.reason


async def double(number: int) -> str:
    return str(2 * number)


async def test_each_call_of_a_response_is_answered_in_its_order_by_its_tool_or_with_the_reason() -> None:
    calls = [
        {"name": "double", "arguments": {"number": 21}},
        {"name": "halve"},
        {"name": "double", "arguments": {"w": 1}},
    ]
    read = tool_calls(f"First {' and then '.join(map(written, calls))}.")
    assert read == [ToolCall("double", {"number": 21}), ToolCall("halve", {}), ToolCall("double", {"w": 1})]
    assert tool_calls("no call at all") == []
    result = await tool_answer([*read, BadCall("no JSON")], {"double": double})
    assert [(of["role"], of.get("name"), of["content"]) for of in result.messages] == [
        ("tool", "double", "42"),
        ("tool", "halve", "error: there is no tool 'halve', only double"),
        ("tool", "double", "error: double: missing a required argument: 'number'"),
        ("tool", None, "error: no JSON"),
    ]
    assert result.info == {"tool_calls": 4.0, "bad_tool_calls": 3.0}


def test_what_stands_between_tags_is_what_a_plain_search_finds_in_linear_time() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["<a>", "</a>", "<", "a>", "\n", "x"], k=rng.randrange(12)))
        assert [found[1] for found in tagged(text, "a")] == re.findall("<a>(.*?)</a>", text, re.DOTALL)
    begun = time.process_time()
    assert len(tagged("<a>" * 200_000 + "</a>" + "<a>" * 200_000, "a")) == 1
    assert time.process_time() - begun < 2  # minutes where each tag is followed to the end
