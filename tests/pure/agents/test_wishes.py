"""Forms of answers that clients ask for are answered freely and noted; calls are read only where tools may."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import xgrammar

from service.agents.conversation_tree import ConversationTree
from service.agents.dialects.answer_form import MAX_FORM_BYTES
from service.agents.dialects.dialect import Refused
from service.agents.policy_calls import IGNORED_HEADER
from service.agents.reply_parser import JsonCalls
from service.handoff.steps.builder import steps_table
from service.rollout.chat.chat import Chat
from service.types import NO_VERSION
from tests.pure.agents.dialect_clients import QUESTION, SEARCH
from tests.pure.agents.dialect_server import DialectServer, events_of
from tests.pure.agents.endpoint import CHAT, COMPLETIONS, MESSAGES, RESPONSES, client_of, opened, whole
from tests.pure.rollout.test_special_tokens import tokenizer_of

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}]},
    RESPONSES: {"input": QUESTION},
    MESSAGES: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 50},
}
TOOLS: dict[str, list[Any]] = {
    CHAT: [{"type": "function", "function": SEARCH}],
    RESPONSES: [{"type": "function", **SEARCH}],
    MESSAGES: [{"name": "search", "input_schema": SEARCH["parameters"]}],
}
JSON_SCHEMA = {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}
OBJECTS = ['{"a": [1]}']
AGES = ['{"age": 17}', '<think>17?</think>\n\n{"age": 17}']
CALLS = ['<tool_call>\n{"name": "search", "arguments": {"query": "fox"}}\n</tool_call>']
NOT_ENFORCED: list[str] = []
WISHES: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (CHAT, {"tool_choice": "required"}, "tool_choice", CALLS),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "search"}}}, "tool_choice", CALLS),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", NOT_ENFORCED),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", NOT_ENFORCED),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", OBJECTS),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format", AGES),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "search"}}, "tool_choice", CALLS),
    (RESPONSES, {"text": {"format": JSON_SCHEMA}}, "text.format", AGES),
    (MESSAGES, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, "tool_choice", CALLS),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "search"}}, "tool_choice", CALLS),
    (MESSAGES, {"output_config": {"format": JSON_SCHEMA}}, "output_config.format", AGES),
    (MESSAGES, {"output_format": JSON_SCHEMA}, "output_format", AGES),
]
KINDS = ("tool_calls", "tool_use", "function_call")
CALL = '<think>hm</think>see <tool_call>{"name": "search", "arguments": {"query": "fox"}}</tool_call>'


@pytest.mark.parametrize(("path", "wish", "field", "texts"), WISHES)
async def test_a_wished_form_is_answered_freely_and_noted_or_enforced_without_loss_or_refused_by_its_field(
    bytes_chat: Chat,
    path: str,
    wish: dict[str, Any],
    field: str,
    texts: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {**ASKED[path], "tools": TOOLS[path], "temperature": 0.1, **wish}
    caplog.set_level(logging.INFO)
    async with opened(bytes_chat) as house, client_of(house, house.session()) as client:
        for stream in (False, True):
            answer = await client.answer(path, {**body, "stream": stream})
            assert answer.status == 200
            assert answer.headers[IGNORED_HEADER].split(", ") == ["temperature", field]
        assert house.structures == ["", ""] and all(step.loss_mask.all() for step in house.steps)
    noted = [record.getMessage() for record in caplog.records if field in record.getMessage()]
    assert len(noted) == 1 and "temperature" in noted[0]
    async with opened(bytes_chat, structured="refuse") as house, client_of(house, house.session()) as client:
        status, refused = await client.post(path, body)
        assert status == 400 and refused["error"]["message"].startswith(f"{field}: ")
        assert not house.steps
    async with opened(bytes_chat, structured="constrain") as house, client_of(house, house.session()) as client:
        house.say = lambda prompt: CALL
        answer = await client.answer(path, body)
        (structure,), (step,) = house.structures, house.steps
        is_enforced = bool(texts)
        assert answer.headers[IGNORED_HEADER].split(", ") == ["temperature", *([] if is_enforced else [field])]
        assert bool(structure) is is_enforced
        assert step.loss_mask.all() != is_enforced and step.loss_mask.any() != is_enforced
        assert (step.versions == NO_VERSION).all() == is_enforced
        assert house.endpoint.calls.constrained == (len(step.response_ids) if is_enforced else 0)
        for text in texts:
            assert matches(structure, text) and not matches(structure, text[:-1]) and not matches(structure, "17")


def matches(structure: str, text: str) -> bool:
    """Whether a text has the form that the engine enforces, by the library that vLLM uses."""
    tokenizer = xgrammar.TokenizerInfo([*map(chr, range(128)), "<end>"], stop_token_ids=[128])
    grammar = xgrammar.GrammarCompiler(tokenizer).compile_structural_tag(structure)
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(128)


async def test_a_constrained_answer_is_continued_exactly_and_a_form_that_no_engine_enforces_is_refused(
    bytes_chat: Chat,
) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "response_format": {"type": "json_object"}}
    async with opened(bytes_chat, structured="constrain") as house:
        session = house.session()
        async with client_of(house, session) as client:
            house.say = lambda prompt: Refused(400, None, "no such grammar")
            status, refused = await client.post(CHAT, asked)
            assert (status, refused["error"]["message"]) == (400, "no such grammar")
            assert (session.state, session._calls, session._tokens, session.n_steps) == ("open", 0, 0, 0)
            house.say = lambda prompt: '{"age": 17}'
            _, answer = await client.post(CHAT, {**asked, "return_token_ids": True})
            sampled = answer["choices"][0]["token_ids"]
            assert sampled == house.replies[0] and answer["usage"]["completion_tokens"] == len(sampled)
            follow = [*asked["messages"], answer["choices"][0]["message"], {"role": "user", "content": "sure?"}]
            await client.post(CHAT, {"messages": follow})
        assert [call.how for call in session.tree.calls] == ["root", "appended"]
        assert whole(house.steps) == house.prompts[1:] and house.steps[1].loss_mask.all()
        restored = ConversationTree(bytes_chat, JsonCalls())
        restored.restore(steps_table(house.steps))
        for call, other in zip(restored.calls, session.tree.calls, strict=True):
            assert (call.n_sampled, call.after) == (other.n_sampled, other.after)


async def test_a_form_that_takes_too_long_to_compile_is_refused_with_the_bound_and_ignored_where_none_is_enforced(
    bytes_chat: Chat,
) -> None:
    def asked(values: int) -> dict[str, Any]:
        schema = {"enum": [f"value-{value}" for value in range(values)]}
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        return {"messages": [{"role": "user", "content": QUESTION}], "response_format": form}

    async with opened(bytes_chat, structured="constrain") as house, client_of(house, house.session()) as client:
        status, refused = await client.post(CHAT, asked(8_000))
        assert (status, refused["error"]["param"]) == (400, "response_format")
        assert refused["error"]["message"].endswith(f" bytes; at most {MAX_FORM_BYTES} are enforced")
        assert not house.structures
        house.say = lambda prompt: '"value-7"'
        status, _ = await client.post(CHAT, asked(2_000))
        assert status == 200 and len(house.structures) == 1
    async with opened(bytes_chat, structured="ignore") as house, client_of(house, house.session()) as client:
        assert (await client.post(CHAT, asked(8_000)))[0] == 200


async def test_fields_that_are_ignored_are_named_by_a_bounded_number_of_plain_names(
    bytes_chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    strange = {"a\r\nSet-Cookie: b": 1, "é": 1, "x" * 65: 1, "": 1, "n": 1, "user": None}
    async with opened(bytes_chat) as house, client_of(house, house.session()) as client:
        answer = await client.answer(CHAT, {**ASKED[CHAT], "guided_json": {}, "text": {"verbosity": "low"}, **strange})
        assert answer.headers[IGNORED_HEADER] == "guided_json, text.verbosity"
        for tools in ("auto", 5, {"type": "x"}, [5]):  # completions have none
            answer = await client.answer(COMPLETIONS, {"prompt": "a", "tools": tools})
            assert (answer.status, answer.headers[IGNORED_HEADER]) == (200, "tools")
        for start in range(0, 1000, 100):
            await client.answer(CHAT, {**ASKED[CHAT], **{f"x{i}": 1 for i in range(start, start + 100)}})
        assert len(caplog.text) < 10_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_call_where_no_tool_may_be_called_is_text_and_the_conversation_goes_on(
    bytes_chat: Chat, path: str, stream: bool
) -> None:
    none: Any = {"type": "none"} if path == MESSAGES else "none"
    for more in ({}, {"tools": TOOLS[path], "tool_choice": none}):
        server = DialectServer(bytes_chat, iter([CALL, "17"]))
        served = server.post(path, json.dumps({**ASKED[path], **more, "stream": stream}).encode())
        said = json.dumps(events_of(served.body) if stream else json.loads(served.body))
        assert "see <tool_call>" in said and not any(f'"{kind}"' in said for kind in KINDS)
        (call,) = server.tree.calls
        name = "input" if path == RESPONSES else "messages"
        answer = {"role": "assistant", "content": call.reply.content}
        follow = [{"role": "user", "content": QUESTION}, answer, {"role": "user", "content": "and?"}]
        assert server.post(path, json.dumps({**ASKED[path], **more, name: follow}).encode()).status == 200
        assert server.tree.calls[1].parent is call


SILENT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
REFUSING = "{% if tools and not tools[0].function.description %}{{ raise_exception('?') }}{% endif %}" + SILENT
SHOWING = "{{ tools }}" + SILENT
TOOL = {"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": {}}}


@pytest.mark.parametrize(("template", "ignored"), [(SILENT, "tools"), (SHOWING, None), (REFUSING, None)])
async def test_tools_that_the_chat_template_does_not_show_are_named_as_ignored(
    template: str, ignored: str | None
) -> None:
    async with opened(Chat(tokenizer_of(template))) as house, client_of(house, house.session()) as client:
        answer = await client.answer(CHAT, {**ASKED[CHAT], "tools": [TOOL]})
        assert (answer.status, answer.headers.get(IGNORED_HEADER)) == (200, ignored)
        assert IGNORED_HEADER not in (await client.answer(CHAT, ASKED[CHAT])).headers
