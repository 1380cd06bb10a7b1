"""vLLM's parsers behind the endpoint's protocol: what they read, and what stays text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from actors.engine.vllm_parser import VllmParser
from service.agents.reply_parser import JsonCalls, Reply
from service.errors import UserError
from service.rollout.chat.chat import Chat
from service.rollout.chat.tools import ToolCall
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

TOOLS: list[Any] = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "search", "arguments": {"query": "marn"}}</tool_call>'
SEARCH = ToolCall("search", {"query": "marn"})
CUT = CALL[:-15]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tokenizer_of(THINKING_AND_JSON)


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["with tools", "without"])
def test_calls_are_read_and_what_is_malformed_stays_text(tokenizer: PreTrainedTokenizerBase, tools: list[Any]) -> None:
    parser = VllmParser("hermes", tokenizer)
    no_object = '<tool_call>{"name": "search", "arguments": 5}</tool_call>'
    for text in ("17", f"a{CALL}", f"b{CALL}\n{CALL}"):
        assert parser.parse(text, tools) == JsonCalls().parse(text, tools)
    for text in ("<tool_call>{</tool_call>", no_object, CUT):
        assert parser.parse(text, tools) == Reply(text, "", ())


def test_thinking_is_read_by_a_parser_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    parser = VllmParser("hermes+deepseek_r1", tokenizer)
    assert parser.parse(f"<think>\nlook\n</think>\n\nb{CALL}", TOOLS) == Reply("b", "look", (SEARCH,))
    assert parser.parse("<think>cut", TOOLS) == Reply("", "cut", ())


def test_a_parser_that_cannot_be_used_is_one_clear_line(tokenizer: PreTrainedTokenizerBase) -> None:
    for name, near in (("hermess", "hermes"), ("hermes+deepseek-r1", "deepseek_r1")):
        with pytest.raises(UserError, match=rf"^agents.tool_parser: vLLM has no parser .*; the nearest is '{near}' of"):
            VllmParser(name, tokenizer)
    with pytest.raises(UserError, match=r"^agents.tool_parser: vLLM cannot use 'deepseek_v3': .*start/end tokens"):
        VllmParser("deepseek_v3", tokenizer)


def test_calls_between_special_tokens_are_read_from_the_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_calls>", "</tool_calls>"]})
    chat = Chat(tokenizer)
    ids = [*chat.encode('a<tool_calls>[{"name": "search", "arguments": {"query": "marn"}}]</tool_calls>').tolist()]
    text = chat.text(np.asarray(ids, np.int32))
    assert "tool_calls" not in text
    parser = VllmParser("jamba", tokenizer, chat.end_ids)
    assert parser.parse(text, TOOLS, [*ids, chat.end_id]) == Reply("a", "", (SEARCH,))
