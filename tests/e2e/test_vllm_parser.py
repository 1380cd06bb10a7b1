"""vLLM's parsers behind the endpoint's protocol: what they read, and what stays text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from actors.engine.agents import VllmParser
from service.agents.messages_and_replies import JsonCalls, Reply
from service.errors import UserError
from service.rollout.chat.chat import Chat
from service.rollout.chat.tools import ToolCall
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]

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


OBJECT = '{"name": "search", "arguments": {"query": "marn"}}'
CODE = "<tool_call>\n<function=search>\n<parameter=query>\nmarn\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>marn</arg_value>\n</tool_call>"
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
WRITTEN: dict[str, tuple[str, str, list[str]]] = {
    "ernie4_5": ("ernie45+ernie45", f"<think>look</think>b<tool_call>\n{OBJECT}\n</tool_call>", []),
    "gemma3": ("functiongemma", "<start_function_call>call:search{query:<escape>marn<escape>}<end_function_call>", []),
    "glm4_moe": ("glm45+glm45", f"<think>look</think>b{GLM}", [*TAGS, "<|assistant|>"]),
    "granite": ("granite4", f"b<tool_call>{OBJECT}</tool_call>", TAGS[:2]),
    "hunyuan_v1_dense": ("hunyuan_a13b", f"<tool_calls>[{OBJECT}]</tool_calls>", []),
    "llama": ("llama3_json", '{"name": "search", "parameters": {"query": "marn"}}', ["<|python_tag|>"]),
    "mistral": ("mistral", f"[TOOL_CALLS][{OBJECT}]", ["[TOOL_CALLS]"]),
    "olmo3": ("olmo3", '<function_calls>search(query="marn")</function_calls>', []),
    "phi3": ("phi4_mini_json", f"functools[{OBJECT}]", []),
    "qwen3_5": ("qwen3_coder+qwen3", f"<think>\nlook\n</think>\n\nb{CODE}", TAGS[:2]),
    "seed_oss": ("seed_oss+seed_oss", f"<seed:think>look</seed:think>b{CODE}".replace("tool_call>", "seed:tool_call>"),
                 ["<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"]),
    "smollm3": ("hermes+deepseek_r1", f"<think>look</think>b{CALL}", []),
}  # fmt: skip
"""Family -> parsers, a response as models of the family write it, and its special tokens."""
EXTRA = ("glm4_moe", "mistral", "qwen3_5", "seed_oss")
"""Families whose parsers import the packages of baton-rl[parsers]."""


@pytest.mark.parametrize("family", WRITTEN)
def test_a_familys_calls_and_thinking_are_read_by_the_parsers_in_the_documentation(family: str) -> None:
    if family in EXTRA:
        pytest.importorskip("ijson")
    name, text, special = WRITTEN[family]
    assert f"| `{family}` | `{name}` |{' yes' if family in EXTRA else ''} |" in Path("docs/models.md").read_text()
    tokenizer = tokenizer_of(THINKING_AND_JSON)
    tokenizer.add_tokens(special, special_tokens=True)
    chat = Chat(tokenizer)
    ids = chat._special_tokens.encode(text).tolist()
    reply = VllmParser(name, tokenizer, chat.end_ids).parse(chat.text(np.asarray(ids, np.int32)), TOOLS, ids)
    assert (reply.calls, reply.thinking) == ((SEARCH,), "look" if "look" in text else "")
    assert reply.content in ("", "b")


def test_a_parser_that_cannot_be_used_is_one_clear_line(tokenizer: PreTrainedTokenizerBase) -> None:
    for name, near in (("hermess", "hermes"), ("hermes+deepseek-r1", "deepseek_r1")):
        with pytest.raises(UserError, match=rf"^agents.tool_parser: vLLM has no parser .*; the nearest is '{near}' of"):
            VllmParser(name, tokenizer)
    with pytest.raises(UserError, match=r"^agents.tool_parser: vLLM cannot use 'deepseek_v3': .*start/end tokens"):
        VllmParser("deepseek_v3", tokenizer)


def test_calls_between_special_tokens_are_read_from_the_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_calls>", "</tool_calls>"]})
    chat = Chat(tokenizer)
    ids = [
        *chat._special_tokens.encode(
            'a<tool_calls>[{"name": "search", "arguments": {"query": "marn"}}]</tool_calls>'
        ).tolist()
    ]
    text = chat.text(np.asarray(ids, np.int32))
    assert "tool_calls" not in text
    parser = VllmParser("jamba", tokenizer, chat.end_ids)
    assert parser.parse(text, TOOLS, [*ids, chat.end_id]) == Reply("a", "", (SEARCH,))
