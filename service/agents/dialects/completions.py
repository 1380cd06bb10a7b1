"""`/v1/completions`: continues text or token ids, without messages, tools or thinking.

request   prompt: "look" or [17, 4]; stream, max_tokens; vLLM's return_token_ids
answer    choices[0].text
events    the text - finish_reason - usage if asked - [DONE]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from service.agents.dialects.body import CompletionFields, Name, TokenIds, ignored_fields, read_as, read_request
from service.agents.dialects.dialect import DONE, CallAnswer, CallRequest, Dialect, frame, head
from service.types import Int32s


class _Ids(Struct):
    prompt: TokenIds


class _Request(CompletionFields, kw_only=True):
    prompt: Name | list[Any]


def read(body: Mapping[str, Any]) -> CallRequest:
    """Read the request; the reply of its call has the whole text as content."""
    request = read_request(body, _Request)
    return CallRequest(
        messages=(),
        prompt=_prompt(request.prompt),
        stream=bool(request.stream),
        max_tokens=request.max_tokens,
        wants_ids=bool(request.return_token_ids),
        include_usage=request.include_usage,
        n=request.n or 1,
        ignored=ignored_fields(body, _Request),
    )


def reply(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    """The answer as a text completion."""
    choices = [{"index": index, **_choice(one, asked)} for index, one in enumerate(answer.all)]
    return {**head(answer, asked, "cmpl", "text_completion"), "choices": choices, "usage": answer.usage}


def events(answer: CallAnswer, asked: CallRequest) -> Iterator[bytes]:
    """The answer as chunks of a text completion."""
    chunk = head(answer, asked, "cmpl", "text_completion")
    for index, one in enumerate(answer.all):
        for piece in (_choice(one, asked) | {"finish_reason": None}, {"text": "", "finish_reason": _finish(one)}):
            yield frame({**chunk, "choices": [{"index": index, **piece}]})
    if asked.include_usage:
        yield frame({**chunk, "choices": [], "usage": answer.usage})
    yield DONE


def _prompt(prompt: str | list[Any]) -> str | Int32s:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    return prompt if isinstance(prompt, str) else np.array(read_as({"prompt": prompt}, _Ids).prompt, np.int32)


def _finish(answer: CallAnswer) -> str:
    return "length" if answer.finish == "length" else "stop"


def _choice(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    choice = {"text": answer.call.reply.content, "finish_reason": _finish(answer)}
    if not asked.wants_ids:
        return {**choice, "logprobs": None}
    ids, logprobs = answer.sampled()
    tokens = {"prompt_token_ids": answer.prompt_ids, "token_ids": ids}
    return {
        **choice,
        **tokens,
        "logprobs": {"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": logprobs},
    }


COMPLETIONS = Dialect("completions", read, reply, events)
