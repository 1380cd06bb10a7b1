"""What clients wish: forms of answers are noted, begun answers are continued, what has no effect is named."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from service.agents.policy_calls import IGNORED_HEADER
from service.rollout.chat.chat import Chat
from tests.pure.agents.endpoint import CHAT, GENERATE, MESSAGES, RESPONSES, Client, client_of, opened
from tests.pure.agents.test_dialects import ASKED, TOOLS
from tests.pure.rollout.test_special_tokens import tokenizer_of

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
JSON_SCHEMA = {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}
WISHES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "search"}}}, "tool_choice"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
    (CHAT, {"guided_json": SCHEMA}, "guided_json"),
    (GENERATE, {"sampling_params": {"temperature": 0.1, "structured_outputs": {"regex": "a+"}}}, "structured_outputs"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "search"}}, "tool_choice"),
    (RESPONSES, {"text": {"format": JSON_SCHEMA}}, "text.format"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, {"output_config": {"format": JSON_SCHEMA}}, "output_config.format"),
    (MESSAGES, {"output_format": JSON_SCHEMA}, "output_format"),
]


@pytest.mark.parametrize(("path", "wish", "field"), WISHES)
async def test_a_wished_form_is_answered_freely_and_noted_or_refused_by_its_field(
    bytes_chat: Chat, path: str, wish: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"tools": TOOLS[path], "temperature": 0.1} if path in TOOLS else {}
    body = {**ASKED.get(path, {"token_ids": [5]}), **more, **wish}
    caplog.set_level(logging.INFO)
    async with opened(bytes_chat) as server, client_of(server, server.session()) as client:
        for stream in (False, True)[: 1 + (path in ASKED)]:
            answer = await client.answer(path, {**body, "stream": stream})
            assert answer.status == 200
            assert answer.headers[IGNORED_HEADER].split(", ") == ["temperature", field]
        assert all(step.loss_mask.all() for step in server.steps)
    noted = [record.getMessage() for record in caplog.records if field in record.getMessage()]
    assert len(noted) == 1 and "temperature" in noted[0]
    async with opened(bytes_chat, structured="refuse") as server, client_of(server, server.session()) as client:
        status, refused = await client.post(path, body)
        assert status == 400 and refused["error"]["message"].startswith(f"{field}: ")
        assert not server.steps


async def test_fields_that_are_ignored_are_named_by_a_bounded_number_of_plain_names(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    strange = {"a\r\nSet-Cookie: b": 1, "é": 1, "x" * 65: 1, "": 1, "n": 1, "user": None}
    answer = await client.answer(CHAT, {**ASKED[CHAT], "guided_json": {}, "text": {"verbosity": "low"}, **strange})
    assert answer.headers[IGNORED_HEADER] == "guided_json, text.verbosity"
    for tools in ("auto", 5, {"type": "x"}, [5]):  # `generate` has none
        answer = await client.answer(GENERATE, {"token_ids": [5], "tools": tools})
        assert (answer.status, answer.headers[IGNORED_HEADER]) == (200, "tools")
    for start in range(0, 1000, 100):
        await client.answer(CHAT, {**ASKED[CHAT], **{f"x{i}": 1 for i in range(start, start + 100)}})
    assert len(caplog.text) < 10_000


SILENT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING = "{% if tools and not tools[0].function.description %}{{ raise_exception('?') }}{% endif %}" + SILENT
SHOWING = "{{ tools }}" + SILENT


@pytest.mark.parametrize(("template", "ignored"), [(SILENT, "tools"), (SHOWING, None), (REFUSING, None)])
async def test_tools_that_the_chat_template_does_not_show_are_named_as_ignored(
    template: str, ignored: str | None
) -> None:
    async with opened(Chat(tokenizer_of(template))) as server, client_of(server, server.session()) as client:
        answer = await client.answer(CHAT, {**ASKED[CHAT], "tools": TOOLS[CHAT]})
        assert (answer.status, answer.headers.get(IGNORED_HEADER)) == (200, ignored)
        assert IGNORED_HEADER not in (await client.answer(CHAT, ASKED[CHAT])).headers


CONTINUES: dict[str, dict[str, Any]] = {CHAT: {"continue_final_message": True}, MESSAGES: {"max_tokens": 50}}


@pytest.mark.parametrize("path", CONTINUES)
async def test_a_begun_answer_is_continued_with_the_tokens_of_transformers_and_the_conversation_goes_on(
    path: str,
) -> None:
    chat = Chat(tokenizer := tokenizer_of(SILENT))
    async with opened(chat) as server:
        session = server.session()
        messages = [{"role": "user", "content": "age? as JSON"}, {"role": "assistant", "content": '{"<|im_end|>age": '}]
        plain = [messages[0], {"role": "assistant", "content": '{"age": '}]
        async with client_of(server, session) as client:
            server.say = lambda prompt: "17}"
            for begun in (plain, messages):
                status, answer = await client.post(path, {**CONTINUES[path], "messages": begun})
                said = answer["choices"][0]["message"]["content"] if path == CHAT else answer["content"][0]["text"]
                assert (status, said) == (200, "17}")
            text = messages[1]["content"] + "17}"
            follow = [messages[0], {"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
            follow += [{"role": "assistant", "content": "yes, "}]
            await client.post(path, {**CONTINUES[path], "messages": follow})
        expected = tokenizer.apply_chat_template(plain, continue_final_message=True, tokenize=False)
        assert server.prompts[0] == tokenizer(expected, add_special_tokens=False)["input_ids"]
        first, second, third = session.tree.calls
        assert [call.how for call in (first, second, third)] == ["root", "root", "appended"] and third.parent is second
        assert server.is_exact and all(step.loss_mask.all() for step in server.steps)
        assert server.prompts[2][-5:] == chat.plain("yes, ").tolist()
        assert server.prompts[1].count(chat.end_id) == server.prompts[0].count(chat.end_id), "it is text"
