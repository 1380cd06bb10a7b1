"""The dialects: equal conversations have equal tokens, what SDKs send is read, and refusals name the field."""

from __future__ import annotations

import json
from time import process_time
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from service.agents.dialects import responses
from service.agents.dialects.dialect import Refused
from service.rollout.chat.chat import Chat
from tests.pure.agents.dialect_clients import CLIENTS, QUESTION, SEARCH, Heard, sdk
from tests.pure.agents.dialect_server import DialectServer, Served, events_of

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


@pytest.mark.parametrize("name", CLIENTS)
def test_a_reply_that_equals_another_one_is_continued_by_the_id_that_came_back(bytes_chat: Chat, name: str) -> None:
    """Two samples of the same request, equal in content: the client goes on from the first one."""
    server = DialectServer(bytes_chat, iter(REPLIES[:1] + REPLIES))
    posted: list[tuple[str, bytes]] = []
    post = server.post

    def twice(path: str, raw: bytes) -> Served:
        posted.append((path, raw))
        first = post(path, raw)
        if len(posted) == 1:
            post(path, raw)
        return first

    server.post = twice  # type: ignore[method-assign]
    CLIENTS[name](server, False, TURNS[:2])
    first, second, third = server.tree.calls
    assert first.reply == second.reply
    assert third.parent is first


CODEX: dict[str, Any] = {
    "model": "policy",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "permissions"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "multi agent"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hi"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "run", "strict": False, "parameters": {}},
        {"type": "namespace", "name": "agents_v1", "description": "", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "x",
    "client_metadata": {"session_id": "x", "turn_id": "y"},
}
CODEX_CALLS = (
    '<think>look</think><tool_call>{"name": "agents_v1__spawn", "arguments": {"task": "x"}}</tool_call>'
    '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n"}}</tool_call>'
    '<tool_call>{"name": "apply_patch", "arguments": {"patch": 5}}</tool_call>'
    '<tool_call>{"name": "no__such", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("interleaved", [False, True])
def test_codex_gets_namespaces_and_free_text_back_as_it_named_them(bytes_chat: Chat, interleaved: bool) -> None:
    server = DialectServer(bytes_chat, iter([CODEX_CALLS, "hi"]))
    events = events_of(server.post("/v1/responses", json.dumps(CODEX).encode()).body)
    schema: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    assert [schema.validate_python(event).sequence_number for event in events] == list(range(len(events)))
    output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == output
    assert [(item["type"], item.get("namespace"), item.get("name")) for item in output] == [
        ("reasoning", None, None),
        ("function_call", "agents_v1", "spawn"),
        ("custom_tool_call", None, "apply_patch"),
        ("function_call", None, "apply_patch"),
        ("function_call", None, "no__such"),
    ]
    assert output[2]["input"] == "*** Begin\n"
    answers = [
        {"type": item["type"] + "_output", "call_id": item["call_id"], "output": "done"}
        for item in output
        if "call_id" in item
    ]
    thought, *calls = [{**item, "id": None} for item in output]
    pairs = [one for pair in zip(calls, answers, strict=True) for one in pair]
    follow = [*CODEX["input"], thought, *(pairs if interleaved else calls + answers)]
    assert server.post("/v1/responses", json.dumps({**CODEX, "input": follow}).encode()).status == 200
    assert [call.how for call in server.tree.calls] == ["root", "appended"]


REFUSED = [
    ("/v1/chat/completions", {"n": 0}, "n"),
    ("/v1/responses", {"n": 2}, "n"),
    ("/v1/chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": []}, "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("/v1/chat/completions", {"tool_choice": "sometimes"}, "tool_choice"),
    ("/v1/chat/completions", {"response_format": {"json_schema": {}}}, "response_format.type"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"background": True}, "background"),
    ("/v1/responses", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}, {"type": "item_reference"}]}, "input[1].type"),
    ("/v1/responses", {"tools": [{"type": "web_search"}, {"type": "custom"}]}, "tools[1].name"),
    ("/v1/messages", {"max_tokens": None}, "max_tokens"),
    ("/v1/messages", {"tools": [{"type": 5, "name": "bash", "input_schema": {}}]}, "tools[0].type"),
    ("/v1/messages", {"thread": {"type": "create"}}, "thread"),
    ("/v1/chat/completions", {"continue_final_message": True}, "messages[0]"),
]
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}]},
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 5},
}


@pytest.mark.parametrize(("path", "fields", "named"), REFUSED)
def test_what_no_session_gives_is_refused_by_the_name_of_its_field(
    bytes_chat: Chat, path: str, fields: dict[str, Any], named: str
) -> None:
    server = DialectServer(bytes_chat, iter([]))
    served = server.post(path, json.dumps({**ASKED[path], **fields}).encode())
    assert served.status == 400
    error = json.loads(served.body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{named}: ")
    assert path == "/v1/messages" or error["param"] == named


@pytest.mark.parametrize("path", ASKED)
def test_pinned_and_unknown_fields_change_nothing(bytes_chat: Chat, path: str) -> None:
    server = DialectServer(bytes_chat, iter(["17", "17"]))
    for more in ({}, {"temperature": 0.1, "top_p": 0.5, "seed": 5, "x": {"y": [None]}, "n": 1, "tool_choice": "auto"}):
        assert server.post(path, json.dumps({**ASKED[path], **more}).encode()).status == 200
    first, second = server.asked
    assert second.ignored == ("temperature", "top_p", "seed", "x")
    assert first._replace(repeated={}) == second._replace(repeated={}, ignored=())


def test_an_openai_client_raises_what_went_wrong_before_and_within_a_stream(bytes_chat: Chat) -> None:
    server = DialectServer(bytes_chat, iter(["17"] * 2))
    client = sdk(server)
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
        client.responses.create(model="policy", input="and?", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    server.failure = Refused(503, None, "the generator stopped", "stopped")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with pytest.raises(openai.APIError, match="the generator stopped"):
        list(client.chat.completions.create(model="policy", messages=messages, stream=True))
    with pytest.raises(openai.APIError, match="the generator stopped"):
        list(client.responses.create(model="policy", input=QUESTION, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_trains_gets_exactly_the_sampled_tokens(bytes_chat: Chat, stream: bool) -> None:
    server = DialectServer(bytes_chat, iter([REPLIES[0], "17"]))
    tools = [{"type": "function", "function": SEARCH}]
    more: Any = {"model": "policy", "tools": tools, "extra_body": {"return_token_ids": True}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    client = sdk(server)
    if stream:
        options: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(messages=messages, stream=True, stream_options=options, **more))
        whole, choice, usage = chunks[0], chunks[0].choices[0], chunks[-1].usage
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "tool_calls"
    else:
        whole = client.chat.completions.create(messages=messages, **more)
        choice, usage = whole.choices[0], whole.usage
    (call,) = server.tree.calls
    sampled = call.response.token_ids.tolist()
    assert whole.prompt_token_ids == call.carried_ids.tolist()
    assert choice.token_ids == sampled
    assert [one.token for one in choice.logprobs.content] == [f"token_id:{one}" for one in sampled]
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(call.carried_ids), len(sampled))


def test_the_time_to_read_a_conversation_of_responses_grows_as_its_items() -> None:
    def seconds(n: int) -> float:
        items: list[dict[str, Any]] = []
        for i in range(n):
            call_id = f"call_a_{i}"
            items.append({"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": call_id, "output": "x"})
        began = process_time()
        asked = responses.read({"input": items})
        ended = process_time()
        assert len(asked.messages[0]["tool_calls"]) == n and len(asked.messages) == n + 1
        return ended - began

    few, many = 2000, 16_000
    fastest = [min(seconds(n) for _ in range(3)) for n in (few, many)]
    assert fastest[1] < 3 * many / few * fastest[0]
