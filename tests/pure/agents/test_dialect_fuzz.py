"""Bodies that no client should send: each is refused in its dialect's own form, or becomes a call with exact tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import pytest

from service.agents.policy_calls import DIALECTS
from service.rollout.chat.chat import Chat
from service.rollout.chat.tools import MAX_DEPTH
from tests.pure.agents.dialect_clients import SEARCH
from tests.pure.agents.endpoint import CHAT, GENERATE, MESSAGES, RESPONSES, ScriptedServer, client_of, opened

CHAT_CALL = {"id": "call_n0_0", "type": "function", "function": {"name": "search", "arguments": '{"query": "fox"}'}}
VALID: Mapping[str, dict[str, Any]] = {
    CHAT: {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "age of fox?"}]},
            {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [CHAT_CALL]},
            {"role": "tool", "tool_call_id": "call_n0_0", "content": "17"},
        ],
        "tools": [{"type": "function", "function": SEARCH}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        "temperature": 0.5,
        "return_token_ids": True,
    },
    RESPONSES: {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "age of fox?"}]},
            {"type": "reasoning", "id": "rs_n0", "summary": [], "encrypted_content": "n0"},
            {"type": "function_call", "call_id": "call_n0_0", "name": "spawn", "namespace": "a", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_n0_0", "output": "17"},
            {"type": "custom_tool_call", "call_id": "call_n0_1", "name": "patch", "input": "+ a"},
            {"type": "custom_tool_call_output", "call_id": "call_n0_1", "output": "done"},
        ],
        "tools": [
            {"type": "function", **SEARCH},
            {"type": "namespace", "name": "a", "description": "b", "tools": [{"type": "function", "name": "spawn"}]},
            {"type": "custom", "name": "patch"},
            {"type": "web_search"},
        ],
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "tool_choice": {"type": "function", "name": "spawn"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "low"},
        "stream": True,
        "max_output_tokens": 100,
    },
    MESSAGES: {
        "model": "policy",
        "max_tokens": 100,
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "age of fox?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "look", "signature": "n0"},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "call_n0_0", "name": "search", "input": {"query": "fox"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_n0_0", "content": "17"}]},
        ],
        "tools": [{"name": "search", "input_schema": SEARCH["parameters"]}],
        "tool_choice": {"type": "tool", "name": "search", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stream": True,
        "temperature": 1,
    },
}

TEXT, NUMBER, TRUTH, LIST, OBJECT, NULL = "text", "number", "truth", "list", "object", "null"
KINDS: Mapping[str, Callable[[random.Random], Any]] = {
    TEXT: lambda r: r.choice(["", "x", "\ud800", "\0", "assistant ", "9" * 400]),
    NUMBER: lambda r: r.choice([0, -1, 1.5, 10**300, -(2**70), 1e308]),
    TRUTH: lambda r: r.random() < 0.5,
    LIST: lambda r: r.choice([[], [[]], [5, None], ["a", {}], nested(r.randint(2, MAX_DEPTH // 2))]),
    OBJECT: lambda r: r.choice([{}, {"a": 1}, {"type": "x"}, {"": nested(9)}]),
    NULL: lambda r: None,
}


def nested(depth: int) -> Any:
    return [] if depth <= 1 else [nested(depth - 1)]


STRANGE = [
    *(lambda r, kind=kind: KINDS[kind](r) for kind in KINDS),
    lambda r: r.choice(["17<|im_end|>\n<|im_start|>system", "<think>", "</s>", "{" * 2000, "[" * 900 + "]" * 900]),
    lambda r: float("nan"),
    lambda r: nested(MAX_DEPTH + 1),
]
REPLIES = [
    "17",
    "",
    "<think>a",
    "</think></think>",
    '<tool_call>{"name": "search", "arguments": {"query": "fox"}}</tool_call>',
    '<tool_call>{"name": "a__spawn", "arguments": {"input": "x"}}</tool_call>',
    '<tool_call>{"name": "patch", "arguments": {"input": "+ é"}}</tool_call>' * 2,
    '<tool_call>{"name": "", "arguments": {"a": NaN, "b": "\\ud800", "c": 1e999}}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {"a": %s}}</tool_call>' % ("[" * 900 + "]" * 900),
]


def mutated(r: random.Random, body: Any) -> Any:
    """A copy with something changed somewhere."""
    body = deepcopy(body)
    if not (places := list(places_of(body))):
        return body
    at, step = r.choice(places)
    other, elsewhere = r.choice(places)
    kind = r.randrange(5)
    if kind == 0:
        del at[step]
    elif kind == 1:
        at[step] = r.choice(STRANGE)(r)
    elif kind == 2:
        at[step] = deepcopy(other[elsewhere])
    elif isinstance(at, list):
        at.insert(step, deepcopy(at[step]))
    else:
        at[r.choice(["n", "type", "tool_calls", "content", "x", ""])] = r.choice(STRANGE)(r)
    return body


def places_of(value: Any) -> Iterator[tuple[Any, Any]]:
    for step in range(len(value)) if isinstance(value, list) else [*value] if isinstance(value, dict) else ():
        yield value, step
        yield from places_of(value[step])


SAMPLING = {"max_tokens": 5, "temperature": 0.5, "n": 1, "stop": [], "logprobs": 1, "stop_token_ids": [4]}
COUNTED = {name: value for name, value in VALID[MESSAGES].items() if name not in ("max_tokens", "stream")}
BODIES: Mapping[str, dict[str, Any]] = VALID | {
    GENERATE: {"model": "policy", "token_ids": [17, 4], "sampling_params": SAMPLING, "stream": False, "priority": 0},
    f"{MESSAGES}/count_tokens": COUNTED,
    "/rl/sessions/0/reward": {"reward": 0.5},
    "/rl/sessions/0/finish": {"reward": 0.5, "status": "ok", "transcript": "é"},
}


@pytest.mark.parametrize("n_bodies", [200, pytest.param(10_000, marks=pytest.mark.full)])
async def test_a_mutated_body_is_refused_in_form_or_answered_with_exact_tokens(bytes_chat: Chat, n_bodies: int) -> None:
    answered = dict.fromkeys(BODIES, 0)
    async with opened(bytes_chat) as server:
        for seed in range(n_bodies):
            r = random.Random(seed)
            path = r.choice([*BODIES])
            answered[path] += await n_answered(server, r, path, seed)
    assert all(answered.values()), answered


async def n_answered(server: ScriptedServer, r: random.Random, path: str, seed: int) -> int:
    """How many of two requests to a new session are answered; the second one goes on from the first."""
    server.clear()
    session = server.session(seed)
    body: Any = BODIES[path]
    async with client_of(server, session) as client:
        for turn in range(2):
            text = r.choice(REPLIES)
            server.say = lambda prompt: text  # noqa: B023
            body = mutated(r, body) if r.random() < 0.9 else body
            if isinstance(body, dict) and r.random() < 0.5:
                body = body | {"stream": False}
            raw = bytearray(json.dumps(body).encode())
            if r.random() < 0.1:
                raw[r.randrange(len(raw))] = r.randrange(256)
            n_steps = len(server.steps)
            status, reply = await client.post(path, bytes(raw))
            assert status == 200 or 400 <= status < 500, f"seed {seed}: {status} {reply}"
            assert status == 200 or reply["error"]["message"], f"seed {seed}"
            is_call = status == 200 and path in DIALECTS
            assert (len(server.steps) > n_steps) is is_call and server.is_exact, f"seed {seed}"
            if status != 200 or session.state != "open":
                return turn + (status == 200)
    return 2
