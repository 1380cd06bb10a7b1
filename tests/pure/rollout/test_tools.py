"""Tool calls: what counts as one, and how each is answered."""

from __future__ import annotations

import json
import random
import re
import time

import pytest

from baton.examples import data
from baton.examples.search_r1 import SearchR1
from service.rollout.chat.tools import BadCall, ToolCall, tool_answer, tool_calls
from service.rollout.environment import Task, tagged


def written(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


SEARCH = {"name": "search", "arguments": {"query": "marn"}}


def test_every_call_of_a_response_is_read_in_its_order() -> None:
    text = f"First {written(SEARCH)} and then {written({'name': 'stop'})}."
    assert tool_calls(text) == [ToolCall("search", {"query": "marn"}), ToolCall("stop", {})]
    assert tool_calls("no call at all") == []


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


async def test_each_call_is_answered_by_a_message_of_its_tool_or_with_the_reason() -> None:
    calls = [
        ToolCall("double", {"number": 21}),
        ToolCall("halve", {"number": 1}),
        ToolCall("double", {"word": 1}),
        BadCall("no JSON"),
    ]
    result = await tool_answer(calls, {"double": double})
    assert [message["role"] for message in result.messages] == ["tool"] * 4
    assert [message["content"] for message in result.messages] == [
        "42",
        "error: there is no tool 'halve', only double",
        "error: double: missing a required argument: 'number'",
        "error: no JSON",
    ]
    assert result.info == {"tool_calls": 4.0, "bad_tool_calls": 3.0}


async def test_search_by_tool_calls_reads_passages_and_ends_with_the_first_answer() -> None:
    town = data.geography().towns[0]
    task = Task("p", ({"role": "user", "content": "?"},), "search_r1", {"ground_truth": town.river})
    environment = SearchR1(calls="tools")
    await environment.reset(task, 0)
    told = await environment.step(written({"name": "search", "arguments": {"query": town.name}}))
    assert told.messages[0]["content"].startswith(f"1 : {town.name} is a town on the river {town.river} .")
    last = await environment.step(f"<answer>{town.river}</answer>")
    assert (last.reward, last.done) == (1.0, True)
    assert (await environment.step("I do not know")).done


def test_what_stands_between_tags_is_what_a_plain_search_finds() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["<a>", "</a>", "<", "a>", "\n", "x"], k=rng.randrange(12)))
        assert [found[1] for found in tagged(text, "a")] == re.findall("<a>(.*?)</a>", text, re.DOTALL)


def test_a_response_that_repeats_a_tag_takes_no_time() -> None:
    begun = time.process_time()
    assert len(tagged("<a>" * 200_000 + "</a>" + "<a>" * 200_000, "a")) == 1
    assert time.process_time() - begun < 2  # minutes where each tag is followed to the end
