"""Forms of answers that clients ask for are answered freely and noted; calls are read only where tools may."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from service.agents.policy_calls import IGNORED_HEADER
from service.rollout.chat.chat import Chat
from tests.pure.agents.dialect_clients import QUESTION, SEARCH
from tests.pure.agents.dialect_server import DialectServer, events_of
from tests.pure.agents.endpoint import CHAT, GENERATE, MESSAGES, RESPONSES, client_of, opened
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
WISHES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "search"}}}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "search"}}, "tool_choice"),
    (RESPONSES, {"text": {"format": JSON_SCHEMA}}, "text.format"),
    (MESSAGES, {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "tool", "name": "search"}}, "tool_choice"),
    (MESSAGES, {"output_config": {"format": JSON_SCHEMA}}, "output_config.format"),
    (MESSAGES, {"output_format": JSON_SCHEMA}, "output_format"),
]
KINDS = ("tool_calls", "tool_use", "function_call")
CALL = '<think>hm</think>see <tool_call>{"name": "search", "arguments": {"query": "fox"}}</tool_call>'


@pytest.mark.parametrize(("path", "wish", "field"), WISHES)
async def test_a_wished_form_is_answered_freely_and_noted_or_refused_by_its_field(
    bytes_chat: Chat,
    path: str,
    wish: dict[str, Any],
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {**ASKED[path], "tools": TOOLS[path], "temperature": 0.1, **wish}
    caplog.set_level(logging.INFO)
    async with opened(bytes_chat) as house, client_of(house, house.session()) as client:
        for stream in (False, True):
            answer = await client.answer(path, {**body, "stream": stream})
            assert answer.status == 200
            assert answer.headers[IGNORED_HEADER].split(", ") == ["temperature", field]
        assert all(step.loss_mask.all() for step in house.steps)
    noted = [record.getMessage() for record in caplog.records if field in record.getMessage()]
    assert len(noted) == 1 and "temperature" in noted[0]
    async with opened(bytes_chat, structured="refuse") as house, client_of(house, house.session()) as client:
        status, refused = await client.post(path, body)
        assert status == 400 and refused["error"]["message"].startswith(f"{field}: ")
        assert not house.steps


async def test_fields_that_are_ignored_are_named_by_a_bounded_number_of_plain_names(
    bytes_chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    strange = {"a\r\nSet-Cookie: b": 1, "é": 1, "x" * 65: 1, "": 1, "n": 1, "user": None}
    async with opened(bytes_chat) as house, client_of(house, house.session()) as client:
        answer = await client.answer(CHAT, {**ASKED[CHAT], "guided_json": {}, "text": {"verbosity": "low"}, **strange})
        assert answer.headers[IGNORED_HEADER] == "guided_json, text.verbosity"
        for tools in ("auto", 5, {"type": "x"}, [5]):  # `generate` has none
            answer = await client.answer(GENERATE, {"token_ids": [5], "tools": tools})
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
