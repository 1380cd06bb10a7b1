"""The SDK of Anthropic against an endpoint that listens: tokens and replies are those that OpenAI's SDK has."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.pure.agents.dialect_clients import CLIENTS, QUESTION, REPLIES, SEARCH, SYSTEM, TURNS
from tests.pure.agents.endpoint import House
from tests.pure.agents.own_environment import IN_TIME, printed_by, python_with
from tests.pure.agents.talks import says

ANTHROPIC = "anthropic==2.12.0"


@IN_TIME
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["create", "stream"])
async def test_the_anthropic_sdk_has_the_same_conversation_at_a_live_endpoint(house: House, kind: str) -> None:
    python, first, second = python_with(ANTHROPIC), house.session(0), house.session(1)
    says(house, *REPLIES, *REPLIES)
    heard = await asyncio.to_thread(CLIENTS["chat"], first, False, TURNS)
    tool = {"name": SEARCH["name"], "description": SEARCH["description"], "input_schema": SEARCH["parameters"]}
    asked = {"question": QUESTION, "system": SYSTEM, "tools": [tool], "turns": TURNS}
    url = second.base_url.removesuffix("/v1")
    printed = await printed_by(python, "anthropic_program.py", url, second.key, kind, json.dumps(asked))
    one, other = ([call.token_ids().tolist() for call in of.tree.calls] for of in (first, second))
    assert one == other
    told = [one.told for one in heard]
    assert [(text, thinking, list(map(tuple, calls))) for text, thinking, calls in printed["heard"]] == told
    assert printed["counted"] == len(house.chat.prompt([{"role": "user", "content": QUESTION}]))
    assert "thread" in printed["refused"]
