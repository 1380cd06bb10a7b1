"""The SDKs of OpenAI and Anthropic against an endpoint that listens: tokens and replies are equal."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from service.rollout.chat.chat import Chat
from tests.pure.agents.dialect_clients import CLIENTS, QUESTION, SEARCH, SYSTEM, Live
from tests.pure.agents.dialect_server import DialectServer
from tests.pure.agents.endpoint import House, opened, whole
from tests.pure.agents.own_environment import IN_TIME, printed_by, python_with
from tests.pure.agents.test_dialects import REPLIES, TURNS, told

ANTHROPIC = "anthropic==2.12.0"


def expected(chat: Chat) -> tuple[list[Any], list[list[int]]]:
    """What a program hears, and the tokens of each call."""
    server = DialectServer(chat, iter(REPLIES))
    heard = [told(one) for one in CLIENTS["chat"](server, False, TURNS)]
    return heard, [call.token_ids().tolist() for call in server.tree.calls]


def made_by(house: House) -> list[list[int]]:
    """The tokens of each step, with its whole prompt."""
    made = zip(whole(house.steps), house.steps, strict=True)
    return [[*prompt, *step.response_ids.tolist()] for prompt, step in made]


@pytest.mark.parametrize("name", ["chat", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_sdk_has_one_exact_conversation_at_a_live_endpoint(
    bytes_chat: Chat, name: str, stream: bool
) -> None:
    heard, tokens = expected(bytes_chat)
    async with opened(bytes_chat) as house:
        replies = iter(REPLIES)
        house.say = lambda prompt: next(replies)
        session = house.session()
        live = Live(session.base_url, session.key)
        assert [told(one) for one in await asyncio.to_thread(CLIENTS[name], live, stream, TURNS)] == heard
        assert made_by(house) == tokens


@IN_TIME
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["create", "stream"])
async def test_the_anthropic_sdk_has_the_same_conversation_at_a_live_endpoint(bytes_chat: Chat, kind: str) -> None:
    python = python_with(ANTHROPIC)
    heard, tokens = expected(bytes_chat)
    tool = {"name": SEARCH["name"], "description": SEARCH["description"], "input_schema": SEARCH["parameters"]}
    asked = {"question": QUESTION, "system": SYSTEM, "tools": [tool], "turns": TURNS}
    async with opened(bytes_chat) as house:
        replies = iter(REPLIES)
        house.say = lambda prompt: next(replies)
        session = house.session()
        url = session.base_url.removesuffix("/v1")
        printed = await printed_by(python, "anthropic_program.py", url, session.key, kind, json.dumps(asked))
        assert made_by(house) == tokens
    assert [(text, thinking, list(map(tuple, calls))) for text, thinking, calls in printed["heard"]] == heard
    assert printed["counted"] == len(bytes_chat.prompt([{"role": "user", "content": QUESTION}]))
    assert "thread" in printed["refused"]
