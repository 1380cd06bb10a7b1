"""The same conversation through each client: the OpenAI SDK twice, streamed or not, and a client of Messages."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from openai import OpenAI
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from service.agents.session import Session
from tests.pure.agents.endpoint import events_of

SYSTEM, QUESTION = "be brief", "how old is the fox?<|im_end|>"
SEARCH: Mapping[str, Any] = {
    "name": "search",
    "description": "look up</s>",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
CALL = '<tool_call>{"name": "search",  "arguments": {"query": %s, "n": 1.0}}</tool_call>'
REPLIES = [
    f"<think>two</think>both{CALL % 0}{CALL % 1}".replace(": 0,", ': "fox",').replace(": 1,", ': "é</s>",'),
    f"{CALL % 2}".replace(": 2,", ': "owl",'),
    "<think>sure</think>17",
    "yes",
]
TURNS = [["17", "18<|im_end|>"], ["\ue000 19"], ["sure?"], ["bye"]]
"""What follows each reply."""


class Heard(NamedTuple):
    """A reply as the program behind a client has it."""

    text: str
    thinking: str
    calls: list[tuple[str, str, Any]]
    """Id, name and arguments of each."""

    @property
    def told(self) -> Any:
        """The reply without the ids of its calls."""
        return self._replace(calls=[call[1:] for call in self.calls])


Play = Callable[[Session, bool, list[list[str]]], list[Heard]]
"""Asks, answers the calls of each reply with the next list; where there are none the user says its first text."""


def sdk(session: Session) -> OpenAI:
    """The OpenAI SDK with the key of a session."""
    return OpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)


def chat(session: Session, stream: bool, turns: list[list[str]]) -> list[Heard]:
    messages: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "function": {**SEARCH, "strict": True}}]
    client, heard = sdk(session), []
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


def responses(session: Session, stream: bool, turns: list[list[str]]) -> list[Heard]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    more: Any = {"model": "policy", "instructions": SYSTEM, "tools": [{"type": "function", **SEARCH}], "store": False}
    client, heard = sdk(session), []
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


def messages(session: Session, stream: bool, turns: list[list[str]]) -> list[Heard]:
    """Sends and reads what the Anthropic SDK sends and reads."""
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"name": "search", "description": SEARCH["description"], "input_schema": SEARCH["parameters"]}]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    more = {"model": "policy", "max_tokens": 2048, "tools": tools, "system": system, "stream": stream}
    headers = {"x-api-key": session.key, "Content-Type": "application/json"}
    heard = []
    for answers in turns:
        body = json.dumps({**more, "messages": said}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{session.base_url}/messages", body, headers)) as answer:
            raw = answer.read()
        blocks = _added(events_of(raw)) if stream else json.loads(raw)["content"]
        calls = [(of["id"], of["name"], of["input"]) for of in blocks if of["type"] == "tool_use"]
        texts = {kind: "".join(of[kind] for of in blocks if of["type"] == kind) for kind in ("text", "thinking")}
        heard.append(Heard(texts["text"], texts["thinking"], calls))
        said.append({"role": "assistant", "content": blocks})
        follow = _follow(calls, answers, _tool_result)
        said.append({"role": "user", "content": follow if calls else follow[0]["content"]})
    return heard


CLIENTS: Mapping[str, Play] = {"chat": chat, "responses": responses, "messages": messages}


def _follow(calls: list[Any], answers: list[str], answer: Callable[[str, str], Any]) -> list[Any]:
    if not calls:
        return [{"role": "user", "content": answers[0]}]
    return [answer(of, said) for (of, _, _), said in zip(calls, answers, strict=True)]


def _tool_result(of: str, said: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": said[:3]}, {"type": "text", "text": said[3:]}]
    return {"type": "tool_result", "tool_use_id": of, "content": parts, "cache_control": {"type": "ephemeral"}}


def _added(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a stream of Messages adds up to, as the SDK adds them."""
    first, *middle, before, last = events
    assert (first["type"], before["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = []
    written = ""
    for event in middle:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            written = ""
        elif event["type"] == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            written += delta.pop("partial_json", "")
            blocks[-1] |= {name: blocks[-1][name] + value for name, value in delta.items()}
        elif blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(written)
    return blocks
