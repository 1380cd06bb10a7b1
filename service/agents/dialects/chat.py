"""`/v1/chat/completions`, the API of the OpenAI SDK, litellm and vLLM's clients.

request   messages, tools, stream, max_tokens or max_completion_tokens;
          vLLM's return_token_ids and return_tokens_as_token_ids
answer    choices[0].message with content, reasoning_content and tool_calls
events    role, content and reasoning - each tool call with its index - finish_reason - usage if asked - [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from service.agents.dialects.body import (
    CommonFields,
    Content,
    Function,
    Name,
    Positive,
    call_request,
    own_tools,
    read_request,
    taken_begun,
    text_of,
)
from service.agents.dialects.dialect import DONE, CallAnswer, CallRequest, Dialect, frame

TOOLS = ("function",)
"""Types of tools that the client runs and describes."""


class _ChatTool(Struct, tag_field="type", tag="function"):
    function: Function


class _Called(Struct):
    name: Name
    arguments: str | dict[str, Any] | None = None


class _ChatCall(Struct):
    function: _Called
    id: str | None = None
    type: Literal["function"] | None = None


class _ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    reasoning_content: Content = None
    reasoning: Content = None
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None
    refusal: None = None
    audio: None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _ChatRequest(CommonFields, kw_only=True):
    messages: Annotated[list[_ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Number of answers that the client asks for."""
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None


def read(body: Mapping[str, Any]) -> CallRequest:
    """Read the request. A client that asks for token ids, in either of vLLM's forms, gets ids and log-probabilities."""
    request = read_request(body, _ChatRequest)
    messages = [_message(message) for message in request.messages]
    begun = taken_begun(messages, bool(request.continue_final_message))
    return call_request(
        body,
        request,
        TOOLS,
        messages=messages,
        begun=begun,
        tools=(tool.function for tool in own_tools(request.tools, _ChatTool, TOOLS)),
        max_tokens=request.max_completion_tokens or request.max_tokens,
        wants_ids=bool(request.return_token_ids or request.return_tokens_as_token_ids),
        wants_logprobs=bool(request.logprobs),
        names_ids=bool(request.return_tokens_as_token_ids),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        n=request.n or 1,
    )


def reply(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    """The answer as a chat completion."""
    choices = []
    for index, one in enumerate(answer.all):
        message = one.call.message()
        if "tool_calls" in message:
            message["content"] = message["content"] or None  # as clients expect
        choices.append({"index": index, "message": message, "finish_reason": one.finish, **_tokens(one, asked)})
    ids = {"prompt_token_ids": answer.prompt_ids} if asked.wants_ids else {}
    return {**_head(answer, asked, "chat.completion"), "choices": choices, "usage": answer.usage, **ids}


def events(answer: CallAnswer, asked: CallRequest) -> Iterator[bytes]:
    """The answer as chunks of a chat completion."""
    chunk = _head(answer, asked, "chat.completion.chunk")
    if asked.wants_ids:
        chunk["prompt_token_ids"] = answer.prompt_ids
    for index, one in enumerate(answer.all):
        for choice in _pieces(one, asked):
            yield frame({**chunk, "choices": [{"index": index, **choice}]})
            chunk.pop("prompt_token_ids", None)
    if asked.include_usage:
        yield frame({**chunk, "choices": [], "usage": answer.usage})
    yield DONE


def _head(answer: CallAnswer, asked: CallRequest, kind: str) -> dict[str, Any]:
    """The first fields of an answer, or of a chunk of a stream. `kind`: the value of the field `object`."""
    return {"id": f"chatcmpl-{answer.call.name}", "object": kind, "created": answer.created, "model": asked.model}


def _pieces(answer: CallAnswer, asked: CallRequest) -> Iterator[dict[str, Any]]:
    """One sample as the chunks of a stream."""
    message = answer.call.message()
    calls = message.pop("tool_calls", ())
    yield {"delta": message, "finish_reason": None, **_tokens(answer, asked)}
    for index, call in enumerate(calls):
        yield {"delta": {"tool_calls": [{"index": index, **call}]}, "finish_reason": None}
    yield {"delta": {}, "finish_reason": answer.finish}


def _message(message: _ChatMessage) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": text_of(message.content),
        "reasoning_content": text_of(message.reasoning_content) or text_of(message.reasoning),
        "tool_calls": [
            {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments or {}}}
            for call in message.tool_calls or ()
        ],
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }


def _tokens(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    """The tokens with their log-probabilities, and vLLM's field of token ids for clients that train."""
    if not (asked.wants_ids or asked.wants_logprobs):
        return {"logprobs": None}
    ids, logprobs = answer.sampled()
    content: list[dict[str, Any]] = [
        {
            "token": f"token_id:{one}" if asked.names_ids else piece.decode(errors="replace"),
            "bytes": list(piece),
            "logprob": logprob,
            "top_logprobs": [],
        }
        for one, logprob, piece in zip(ids, logprobs, answer.pieces, strict=True)
    ]
    return {"logprobs": {"content": content}, **({"token_ids": ids} if asked.wants_ids else {})}


CHAT = Dialect("chat", read, reply, events)
