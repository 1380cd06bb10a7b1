"""The dialects: equal conversations have equal tokens, what SDKs send is read, and refusals name the field."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any, get_type_hints

import numpy as np
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from service.agents import policy_calls
from service.agents.dialects import responses
from service.agents.dialects.dialect import Refused
from service.agents.policy_calls import DIALECTS
from service.agents.session import Session
from service.handoff.steps.values import StopReason
from service.rollout.environment import TrajectoryFailed
from tests.pure.agents.dialect_clients import CLIENTS, QUESTION, REPLIES, SEARCH, TURNS, Heard, sdk
from tests.pure.agents.endpoint import CHAT, GENERATE, MESSAGES, RESPONSES, Client, ScriptedServer, client_of, until
from tests.pure.agents.talks import ALL, ChatTalk, ResponsesTalk, called, says
from tests.pure.rollout.conftest import generated


async def test_the_same_conversation_has_the_same_tokens_through_every_client(server: ScriptedServer) -> None:
    tokens, replies = [], []
    for number, (play, stream) in enumerate(product(CLIENTS.values(), (False, True))):
        says(server, *REPLIES)
        session = server.session(number)
        replies.append([heard.told for heard in await asyncio.to_thread(play, session, stream, TURNS)])
        assert [call.how for call in session.tree.calls] == ["root"] + ["appended"] * 3
        assert [call.parent for call in session.tree.calls] == [None, *session.tree.calls[:-1]]
        tokens.append([call.token_ids().tolist() for call in session.tree.calls])
        assert server.is_exact and all(step.loss_mask.all() for step in server.steps)
        # The tools, the system message, the question, and the answers and what follows: no text opens a turn.
        starts = int(server.chat._special_tokens.encode("<|im_start|>")[0])
        assert server.prompts[-1].count(starts) == 3 + 3 + 4 + 1
        server.clear()
    assert all(one == tokens[0] for one in tokens)
    assert all(one == replies[0] for one in replies)
    assert replies[0][0] == Heard("both", "two", [("search", {"query": q, "n": 1.0}) for q in ("fox", "é</s>")])


@ALL
async def test_a_reply_that_equals_another_one_is_continued_by_the_id_that_came_back(
    server: ScriptedServer, session: Session, client: Client, make: type[ChatTalk]
) -> None:
    """Two samples of the same request, equal in content: the client goes on from the first one."""
    says(server, called(), called(), "17")
    talk = make("age ?")
    first, _ = [(await client.post(talk.path, talk.body()))[1] for _ in range(2)]
    talk.answered(first, "owl")
    assert (await client.post(talk.path, talk.body()))[0] == 200
    one, other, third = session.tree.calls
    assert one.reply == other.reply and third.parent is one


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
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
}
CODEX_CALLS = (
    '<think>look</think><tool_call>{"name": "agents_v1__spawn", "arguments": {"task": "x"}}</tool_call>'
    '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n"}}</tool_call>'
    '<tool_call>{"name": "apply_patch", "arguments": {"patch": 5}}</tool_call>'
    '<tool_call>{"name": "no__such", "arguments": {}}</tool_call>'
)


@pytest.mark.parametrize("interleaved", [False, True])
async def test_codex_gets_namespaces_and_free_text_back_as_it_named_them(
    server: ScriptedServer, session: Session, client: Client, interleaved: bool
) -> None:
    says(server, CODEX_CALLS, "hi")
    _, events = await client.post(RESPONSES, CODEX)
    schema: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    assert [schema.validate_python(event).sequence_number for event in events] == list(range(len(events)))
    output = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == output
    deltas = [event["delta"] for event in events if event["type"].endswith("delta")]
    assert deltas == ["look", '{"task": "x"}', "*** Begin\n", '{"patch": 5}', "{}"]
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
    assert (await client.post(RESPONSES, {**CODEX, "input": follow}))[0] == 200
    assert [call.how for call in session.tree.calls] == ["root", "appended"]


ASKS = {"role": "user", "content": "age?"}
USES = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
"""Only the text of an assistant can be continued."""
NAMED = {"type": "function_call", "call_id": "c", "name": "f"}
ODD = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": of}} for of in ('{"no": json', "[NaN]")],
}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]
REFUSED = [
    (CHAT, {"n": 0}, "n"),
    (RESPONSES, {"n": 2}, "n"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
    (CHAT, {"stream": 1}, "stream"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].type"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (CHAT, {"tool_choice": "sometimes"}, "tool_choice"),
    (CHAT, {"response_format": {"json_schema": {}}}, "response_format.type"),
    (CHAT, {"continue_final_message": True}, "messages[0]"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"metadata": []}, "metadata"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"input": [{"role": "user", "content": "a"}, {"type": "item_reference"}]}, "input[1]"),
    (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "custom"}]}, "tools[1].name"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"system": [{"type": "text", "text": None}]}, "system[0].text"),
    (MESSAGES, {"tools": [{"type": 5, "name": "bash", "input_schema": {}}]}, "tools[0].type"),
    (MESSAGES, {"tools": [{"name": "bash"}]}, "tools[0].input_schema"),
    (MESSAGES, {"thread": {"type": "create"}}, "thread"),
    (MESSAGES, {"messages": [ASKS, {"role": "assistant", "content": [USES]}]}, "messages[1]"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "metadata": {"x": 1e400}}', "metadata.x"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "messages[0].content"),
    (MESSAGES, b'{"tools": [{"name": "f", "input_schema": {"x": "\\ud800", "y": NaN}}]}', "tools[0].input_schema.y"),
    (RESPONSES, b'{"input": "a", "tools": [{"x": "\\ud800", "x": 1}]}', "tools[0].x"),
    (CHAT, {"messages": [ASKS, ODD]}, "arguments[0]"),
    *(
        (CHAT, {"messages": [ASKS, {"role": "assistant", "content": "a", of: "said"}]}, f"messages[1].{of}")
        for of in ("refusal", "audio", "function_call")
    ),
    (
        RESPONSES,
        {"input": [{"type": "function_call", **NAMED, "arguments": '{"x": {"y": 1, "y": 2}}'}]},
        "arguments.x.y",
    ),
]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": QUESTION}]},
    RESPONSES: {"input": QUESTION},
    MESSAGES: {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 50},
}


async def test_what_no_session_gives_is_refused_by_the_name_of_its_field(
    server: ScriptedServer, client: Client
) -> None:
    for path, fields, named in REFUSED:
        status, reply = await client.post(path, {**ASKED[path], **fields} if isinstance(fields, dict) else fields)
        error = reply["error"]
        assert (status, error["type"]) == (400, "invalid_request_error"), fields
        assert error["message"].startswith(f"{named}: ") and (path == MESSAGES or error["param"] == named)
    assert server.prompts == []


@pytest.mark.parametrize("path", ASKED)
def test_pinned_and_unknown_fields_change_nothing(path: str) -> None:
    more = {"temperature": 0.1, "seed": 5, "x": {"y": [None]}, "n": 1, "tool_choice": "auto"}
    first, second = (DIALECTS[path].read({**ASKED[path], **fields}) for fields in ({}, more))
    assert second.ignored == ("temperature", "seed", "x")
    assert first._replace(repeated={}) == second._replace(repeated={}, ignored=())


@pytest.mark.parametrize("path", [*ASKED, GENERATE])
async def test_a_request_truncates_the_sampler_as_far_as_the_run_keeps_room_for_supports(
    server: ScriptedServer, path: str
) -> None:
    def body(**fields: float) -> dict[str, Any]:
        return ASKED[path] | fields if path in ASKED else {"token_ids": [5, 6], "sampling_params": fields}

    plain, support = server.sampled("17"), np.array([3, 9], np.int32)
    sizes = np.array([3, *[1] * (len(plain.token_ids) - 1)], np.uint16)
    server.say = lambda prompt: replace(plain, support_size=sizes, support=support)
    async with client_of(server, server.session(0)) as client:
        for named in ({"top_p": 0.5}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.1}):
            status, reply = await client.post(path, body(**named))
            assert status == 400 and next(iter(named)) in reply["error"]["message"]
        assert (await client.post(path, body(top_p=1, top_k=-1, frequency_penalty=0)))[0] == 200
    server.allowed = replace(server.allowed, sampling=replace(server.allowed.sampling, top_p=0.9, top_k=20))
    async with client_of(server, server.session(1)) as client:
        for named in ({"top_k": 21}, {"top_k": 0}):
            status, reply = await client.post(path, body(**named))
            assert status == 400 and "at most 20 tokens to draw from" in reply["error"]["message"]
        assert (await client.post(path, body(top_k=5, min_p=0.1)))[0] == 200
    server.allowed = replace(server.allowed, sampling=replace(server.allowed.sampling, top_k=0))
    async with client_of(server, server.session(2)) as client:
        status, reply = await client.post(path, body(top_k=513))
        assert status == 400 and "at most 512 tokens to draw from" in reply["error"]["message"]
    assert [(s.top_p, s.top_k, s.min_p) for s in server.samplings] == [(1, 0, 0), (0.9, 5, 0.1)]
    assert server.steps[1].support is support and server.steps[1].support_size is sizes


async def test_an_openai_client_raises_what_went_wrong_before_and_within_a_stream(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    server.say = lambda prompt: TrajectoryFailed(StopReason.ENGINE_TIMEOUT, "no turn")
    asked: Any = {"model": "policy", "stream": True}
    for number, of in enumerate((CHAT, RESPONSES)):
        client = sdk(server.session(number))
        create: Any = client.chat.completions.create if of == CHAT else client.responses.create
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await asyncio.to_thread(create, **asked, **ASKED[of], extra_body={"previous_response_id": "resp_1"})
        server.clear()
        server.sampling.clear()
        asking = asyncio.create_task(asyncio.to_thread(lambda: list(create(**asked, **ASKED[of]))))  # noqa: B023
        await until(lambda: server.prompts)
        await asyncio.sleep(0.1)
        server.sampling.set()
        with pytest.raises(openai.APIError, match="engine_timeout"):
            await asking


IDS = {"return_token_ids": True}
NEMO_GYM = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
"""What `responses_api_models/vllm_model/app.py` of nemo-gym 0.7.0 sends by default."""


@pytest.mark.parametrize(("stream", "fields"), [(False, IDS), (True, IDS), (False, NEMO_GYM)])
async def test_a_client_that_trains_gets_exactly_the_sampled_tokens(
    server: ScriptedServer, session: Session, stream: bool, fields: dict[str, Any]
) -> None:
    says(server, REPLIES[0])
    more: Any = {"model": "policy", "tools": [{"type": "function", "function": SEARCH}], **ASKED[CHAT]}
    more |= {"extra_body": fields}
    create: Any = sdk(session).chat.completions.create
    if stream:
        more |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await asyncio.to_thread(lambda: list(create(**more)))
        whole, choice, usage = chunks[0], chunks[0].choices[0], chunks[-1].usage
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "tool_calls"
    else:
        whole = await asyncio.to_thread(create, **more)
        choice, usage = whole.choices[0], whole.usage
    (prompt,), (sampled,) = server.prompts, server.replies
    assert (whole.prompt_token_ids, choice.token_ids) == (prompt, sampled)
    texts = [server.chat.text(np.array([one]), True) for one in sampled]
    named = [f"token_id:{one}" for one in sampled] if fields is NEMO_GYM else texts
    assert [one.token for one in choice.logprobs.content] == named
    assert [one.logprob for one in choice.logprobs.content] == server.steps[0].logprobs.tolist()
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(sampled))


def test_the_time_to_read_a_conversation_of_responses_grows_as_its_items() -> None:
    def seconds(n: int) -> float:
        items: list[dict[str, Any]] = []
        for i in range(n):
            items.append({"type": "function_call", "call_id": f"call_a_{i}", "name": "f", "arguments": "{}"})
            items.append({"type": "function_call_output", "call_id": f"call_a_{i}", "output": "x"})
        began = process_time()
        asked = responses.read({"input": items})
        assert len(asked.messages[0]["tool_calls"]) == n and len(asked.messages) == n + 1
        return process_time() - began

    few, many = 2000, 16_000
    fastest = [min(seconds(n) for _ in range(3)) for n in (few, many)]
    assert fastest[1] < 3 * many / few * fastest[0]


KINDS = ("tool_calls", "tool_use", "function_call")
CALL = '<think>hm</think>see <tool_call>{"name": "search", "arguments": {"query": "fox"}}</tool_call>'
TOOLS: dict[str, list[Any]] = {
    CHAT: [{"type": "function", "function": SEARCH}],
    RESPONSES: [{"type": "function", **SEARCH}],
    MESSAGES: [{"name": "search", "input_schema": SEARCH["parameters"]}],
}


@pytest.mark.parametrize("path", ASKED)
async def test_a_call_where_no_tool_may_be_called_is_text_and_the_conversation_goes_on(
    server: ScriptedServer, path: str
) -> None:
    none: Any = {"type": "none"} if path == MESSAGES else "none"
    cases = product(({}, {"tools": TOOLS[path], "tool_choice": none}), (False, True))
    for number, (more, stream) in enumerate(cases):
        says(server, CALL, "17")
        async with client_of(server, session := server.session(number)) as client:
            said = json.dumps((await client.post(path, {**ASKED[path], **more, "stream": stream}))[1])
            assert "see <tool_call>" in said and not any(f'"{kind}"' in said for kind in KINDS)
            answer = {"role": "assistant", "content": session.tree.calls[0].reply.content}
            follow = [{"role": "user", "content": QUESTION}, answer, {"role": "user", "content": "and?"}]
            name = "input" if path == RESPONSES else "messages"
            assert (await client.post(path, {**ASKED[path], **more, name: follow}))[0] == 200
        assert session.tree.calls[1].parent is session.tree.calls[0]


PAGE = Path("docs/agent-recipes.md").read_text()
SDK: dict[str, Any] = {CHAT: CompletionCreateParamsBase, RESPONSES: ResponseCreateParamsBase}
LIKELY = (True, 2, 0.5, "x", {"type": "x"}, [{"type": "x"}], ["x"], {"x": "y"})
"""Values of the kinds that fields have; one of them fits each field, and none is neutral."""


def listed(path: str) -> list[set[str]]:
    """The honoured, the ignored and the refused fields of a dialect, as the page has them."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {DIALECTS[path].name} |"))
    return [set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[2:5]]


def fate(path: str, field: str) -> str:
    """What becomes of a field with a value that has an effect."""
    fates = set()
    for value in LIKELY:
        body: dict[str, Any] = {**ASKED[path], field: value}
        try:
            fates.add("ignored" if field in DIALECTS[path].read(body).ignored else "honoured")
        except Refused as refused:
            fates.add("refused" if (refused.field or "").split(".")[0].split("[")[0] == field else "honoured")
    return fates.pop() if len(fates) == 1 else "honoured"


@pytest.mark.parametrize("path", ASKED)
def test_every_field_of_a_request_is_honoured_ignored_or_refused_as_it_is_listed(path: str) -> None:
    honoured, ignored, refused = listed(path)
    names = honoured | ignored | refused
    assert len(names) == len(honoured) + len(ignored) + len(refused)
    for name in names - ASKED[path].keys() - {"messages", "tools"}:
        expected = "honoured" if name in honoured else "ignored" if name in ignored else "refused"
        assert fate(path, name) == expected, name


@pytest.mark.parametrize("path", SDK)
def test_every_field_of_the_installed_sdk_is_listed(path: str) -> None:
    assert {*get_type_hints(SDK[path]), "stream"} <= set[str]().union(*listed(path))


@pytest.mark.parametrize("shape", ["previous", "reference", "late text", "in order"])
async def test_a_second_request_of_responses_as_clients_ship_it_continues_the_first(
    server: ScriptedServer, session: Session, client: Client, shape: str
) -> None:
    server.say = lambda prompt: "ok" if server.replies else called()
    talk = ResponsesTalk("hi")
    _, first = await client.post(talk.path, talk.body())
    thought, text, call = first["output"]
    body, asked = talk.body(), talk.input
    told = {"type": "function_call_output", "call_id": call["call_id"], "output": "SEVENTEEN"}
    say = {"role": "assistant", "content": text["content"][0]["text"]}
    named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    body |= {
        "previous": {"input": [told], "previous_response_id": first["id"]},
        "reference": {"input": [*asked, *named, told]},
        "late text": {"input": [*asked, thought, call, say, told]},
        "in order": {"input": [*asked, thought, say, call, told]},
    }[shape]
    status, second = await client.post(talk.path, body)
    assert status == 200, second
    assert session.tree.calls[1].parent is session.tree.calls[0] and server.is_exact
    assert "SEVENTEEN" in server.chat.text(session.tree.calls[1].carried_ids)
    body = talk.body() | {
        "input": [*asked, *first["output"], told, *second["output"], {"role": "user", "content": "?"}]
    }
    assert (await client.post(talk.path, body))[0] == 200 and session.tree.calls[2].parent is session.tree.calls[1]
    for unknown in ({"previous_response_id": "resp_x"}, {"input": [{"type": "item_reference", "id": "msg_x"}]}):
        status, refused = await client.post(talk.path, talk.body() | unknown)
        assert status == 400 and "send the" in refused["error"]["message"]


async def test_what_clients_change_in_a_conversation_does_not_end_it(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    """Tools in another order and with a clock in a description, numbers of clients with doubles, names."""
    server.say = lambda prompt: "ok" if server.replies else called(f'{{"query": "marn", "n": {(1 << 60) + 1}}}')
    tools = [{"type": "function", "function": {"name": name, "description": "12:00"}} for name in ("search", "add")]
    body = {"messages": [{"role": "user", "content": "hi", "name": "Ann"}], "tools": tools, "logprobs": True}
    _, first = await client.post(CHAT, body)
    message = first["choices"][0]["message"]
    pieces = first["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(of["bytes"]) for of in pieces).decode().startswith(called("")[:9])
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = call["function"]["arguments"].replace(str((1 << 60) + 1), str(1 << 60))
    told = {"role": "tool", "tool_call_id": call["id"], "content": "17"}
    tools = [{"type": "function", "function": {"name": name, "description": "12:01"}} for name in ("add", "search")]
    status, _ = await client.post(CHAT, body | {"messages": [*body["messages"], message, told], "tools": tools})
    assert status == 200 and session.tree.calls[1].how == "appended"


async def test_log_probabilities_name_texts_and_bytes_and_are_numbers(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    ids = [*server.chat.plain("é?").tolist(), server.chat.end_id]
    server.say = lambda prompt: replace(generated(ids), logprobs=np.array([-1, np.nan, -np.inf, -0.5], np.float32))
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    _, reply = await client.post(CHAT, body)
    content = reply["choices"][0]["logprobs"]["content"]
    assert bytes(b for of in content for b in of["bytes"]) == "é?<|im_end|>".encode()
    assert [of["token"] for of in content] == ["\ufffd", "\ufffd", "?", "<|im_end|>"]
    assert [of["logprob"] for of in content] == [-1, -9999, -9999, -0.5]
    _, reply = await client.post(CHAT, body | {"return_tokens_as_token_ids": True})
    assert reply["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ids[0]}"


async def test_an_error_of_a_tool_and_a_wish_for_single_calls_are_named_as_ignored(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": "boom", "is_error": True}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    named = "messages.content.is_error, tool_choice.disable_parallel_tool_use"
    assert (await client.answer(MESSAGES, body)).headers["X-Baton-Ignored"] == named
