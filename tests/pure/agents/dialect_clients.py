"""The same conversation through each client: the OpenAI SDK twice, streamed or not, and a client of Messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import httpx2
from openai import OpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.pure.agents.dialect_server import DialectServer, Served, events_of
from tests.pure.agents.messages_schema import check_events, check_message

SYSTEM, QUESTION = "be brief", "how old is the fox?<|im_end|>"
SEARCH: Mapping[str, Any] = {
    "name": "search",
    "description": "look up</s>",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


class Heard(NamedTuple):
    """A reply as the program behind a client has it."""

    text: str
    thinking: str
    calls: list[tuple[str, str, Any]]
    """Id, name and arguments of each."""


Play = Callable[[Any, bool, list[list[str]]], list[Heard]]
"""Asks, answers the calls of each reply with the next list; where there are none the user says its first text."""


class Live(NamedTuple):
    """An endpoint that listens."""

    url: str
    key: str


def sdk(server: DialectServer | Live) -> OpenAI:
    """The OpenAI SDK in front of a server."""
    if isinstance(server, Live):
        return OpenAI(base_url=server.url, api_key=server.key, max_retries=0)

    def answer(request: httpx2.Request) -> httpx2.Response:
        served = server.post(request.url.path, request.content)
        kind = "text/event-stream" if served.is_stream else "application/json"
        return httpx2.Response(served.status, content=served.body, headers={"content-type": kind})

    client = httpx2.Client(transport=httpx2.MockTransport(answer))
    return OpenAI(base_url="http://policy/v1", api_key="key", http_client=client, max_retries=0)


def chat(server: DialectServer | Live, stream: bool, turns: list[list[str]]) -> list[Heard]:
    messages: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "function": {**SEARCH, "strict": True}}]
    client, heard = sdk(server), []
    for answers in turns:
        completion: ChatCompletion
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
                completion = events.get_final_completion()
        else:
            completion = client.chat.completions.create(model="policy", messages=messages, tools=tools)
        message = completion.choices[0].message
        calls = [(of.id, of.function.name, json.loads(of.function.arguments)) for of in message.tool_calls or ()]  # type: ignore[union-attr]
        heard.append(Heard(message.content or "", getattr(message, "reasoning_content", ""), calls))
        messages.append(message.model_dump(exclude_none=True))
        messages += _follow(calls, answers, lambda of, said: {"role": "tool", "tool_call_id": of, "content": said})
    return heard


def responses(server: DialectServer | Live, stream: bool, turns: list[list[str]]) -> list[Heard]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    more: Any = {"model": "policy", "instructions": SYSTEM, "tools": [{"type": "function", **SEARCH}], "store": False}
    client, heard = sdk(server), []
    for answers in turns:
        response: Response
        if stream:
            with client.responses.stream(input=items, **more) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(input=items, **more)
        Response.model_validate(response.to_dict())
        calls = [
            (of.call_id, of.name, json.loads(of.arguments)) for of in response.output if of.type == "function_call"
        ]
        thinking = [of.content[0].text for of in response.output if of.type == "reasoning" and of.content]
        heard.append(Heard(response.output_text, "".join(thinking), calls))
        items += [of.model_dump(exclude_none=True) for of in response.output]
        items += _follow(
            calls, answers, lambda of, said: {"type": "function_call_output", "call_id": of, "output": said}
        )
    return heard


def messages(server: DialectServer, stream: bool, turns: list[list[str]]) -> list[Heard]:
    """Sends and reads what the Anthropic SDK sends and reads."""
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"name": "search", "description": SEARCH["description"], "input_schema": SEARCH["parameters"]}]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    more = {"model": "policy", "max_tokens": 2048, "tools": tools, "system": system, "stream": stream}
    heard = []
    for answers in turns:
        served = server.post("/v1/messages", json.dumps({**more, "messages": said}).encode())
        blocks = _blocks(served)
        calls = [(of["id"], of["name"], of["input"]) for of in blocks if of["type"] == "tool_use"]
        texts = {kind: "".join(of[kind] for of in blocks if of["type"] == kind) for kind in ("text", "thinking")}
        heard.append(Heard(texts["text"], texts["thinking"], calls))
        said.append({"role": "assistant", "content": blocks})
        follow = _follow(calls, answers, _tool_result)
        said.append({"role": "user", "content": follow} if calls else follow[0])
    return heard


CLIENTS: Mapping[str, Play] = {"chat": chat, "responses": responses, "messages": messages}


def _follow(calls: list[Any], answers: list[str], answer: Callable[[str, str], Any]) -> list[Any]:
    if not calls:
        return [{"role": "user", "content": answers[0]}]
    return [answer(of, said) for (of, _, _), said in zip(calls, answers, strict=True)]


def _tool_result(of: str, said: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}]
    return {"type": "tool_result", "tool_use_id": of, "content": parts, "cache_control": {"type": "ephemeral"}}


def _blocks(served: Served) -> list[dict[str, Any]]:
    if not served.is_stream:
        return check_message(json.loads(served.body))
    return check_events(events_of(served.body))
