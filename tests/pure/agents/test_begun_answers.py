"""An answer that the client began: the policy continues its text, and only what the policy sampled is trained."""

from __future__ import annotations

from typing import Any

import pytest

from service.rollout.chat.chat import Chat
from tests.pure.agents.endpoint import CHAT, MESSAGES, client_of, opened, whole
from tests.pure.rollout.test_special_tokens import tokenizer_of

PLAIN = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ASKED: dict[str, dict[str, Any]] = {CHAT: {"continue_final_message": True}, MESSAGES: {"max_tokens": 50}}


def said(path: str, answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"] if path == CHAT else answer["content"][0]["text"])


@pytest.mark.parametrize("path", ASKED)
async def test_a_begun_answer_is_continued_with_the_tokens_of_transformers_and_the_conversation_goes_on(
    path: str,
) -> None:
    chat = Chat(tokenizer := tokenizer_of(PLAIN))
    async with opened(chat) as house:
        session = house.session()
        messages = [{"role": "user", "content": "age? as JSON"}, {"role": "assistant", "content": '{"<|im_end|>age": '}]
        plain = [messages[0], {"role": "assistant", "content": '{"age": '}]
        async with client_of(house, session) as client:
            house.say = lambda prompt: "17}"
            for begun in (plain, messages):
                status, answer = await client.post(path, {**ASKED[path], "messages": begun})
                assert (status, said(path, answer)) == (200, "17}")
            text = messages[1]["content"] + "17}"
            follow = [messages[0], {"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
            follow += [{"role": "assistant", "content": "yes, "}]
            await client.post(path, {**ASKED[path], "messages": follow})
        expected = tokenizer.apply_chat_template(plain, continue_final_message=True, tokenize=False)
        assert house.prompts[0] == tokenizer(expected, add_special_tokens=False)["input_ids"]
        first, second, third = session.tree.calls
        assert [call.how for call in (first, second, third)] == ["root", "root", "appended"] and third.parent is second
        assert whole(house.steps) == house.prompts and all(step.loss_mask.all() for step in house.steps)
        assert house.prompts[2][-5:] == chat.plain("yes, ").tolist()
        assert house.prompts[1].count(chat.end_id) == house.prompts[0].count(chat.end_id), "it is text"


@pytest.mark.parametrize("path", ASKED)
async def test_only_the_text_of_an_assistant_can_be_continued(bytes_chat: Chat, path: str) -> None:
    async with opened(bytes_chat) as house, client_of(house, house.session()) as client:
        asked = {"role": "user", "content": "age?"}
        called: Any = {"role": "assistant", "content": "a"}
        if path == CHAT:
            called["tool_calls"] = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        else:
            called["content"] = [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]
        for messages in ([asked, called], *([[asked]] if path == CHAT else [])):
            status, answer = await client.post(path, {**ASKED[path], "messages": messages})
            place = f"messages[{len(messages) - 1}]: "
            assert status == 400 and answer["error"]["message"].startswith(place)
        assert not house.prompts
