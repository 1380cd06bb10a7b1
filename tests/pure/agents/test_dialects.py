"""The dialects: equal conversations have equal tokens, what SDKs send is read, and refusals name the field."""

from __future__ import annotations

from typing import Any

from service.rollout.chat.chat import Chat
from tests.pure.agents.dialect_clients import CLIENTS, Heard
from tests.pure.agents.dialect_server import DialectServer

CALL = '<tool_call>{"name": "search",  "arguments": {"query": %s, "n": 1.0}}</tool_call>'
REPLIES = [
    f"<think>two</think>both{CALL % 0}{CALL % 1}".replace(": 0,", ': "fox",').replace(": 1,", ': "é</s>",'),
    f"{CALL % 2}".replace(": 2,", ': "owl",'),
    "<think>sure</think>17",
    "yes",
]
TURNS = [["17", "18<|im_end|>"], ["\ue000 19"], ["sure?"], ["bye"]]


def told(heard: Heard) -> Any:
    """A reply without the ids of its calls."""
    return heard._replace(calls=[call[1:] for call in heard.calls])


def test_the_same_conversation_has_the_same_tokens_through_every_client(bytes_chat: Chat) -> None:
    tokens, replies = [], []
    for play in CLIENTS.values():
        for stream in (False, True):
            server = DialectServer(bytes_chat, iter(REPLIES))
            replies.append([told(heard) for heard in play(server, stream, TURNS)])
            assert [call.how for call in server.tree.calls] == ["root"] + ["appended"] * 3
            assert [call.parent for call in server.tree.calls] == [None, *server.tree.calls[:-1]]
            tokens.append([call.token_ids().tolist() for call in server.tree.calls])
    assert all(one == tokens[0] for one in tokens)
    assert all(one == replies[0] for one in replies)
    assert replies[0][0] == Heard("both", "two", [("search", {"query": q, "n": 1.0}) for q in ("fox", "é</s>")])
