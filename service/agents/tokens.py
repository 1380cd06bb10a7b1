"""Clients that bring tokens: `/inference/v1/generate` as vLLM has it, `/tokenize` and `/detokenize`.

{"token_ids": [1 2 3], "sampling_params": {"max_tokens": 8}}  ->  {"choices": [{"token_ids": [4 5], "logprobs": ...}]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from service.agents.dialects.types import Answer, Asked, Refused
from service.agents.messages import read_messages
from service.rollout.chat.chat import Chat
from service.types import NO_VERSION, Int32s

NEEDED = ("token_ids", "sampling_params")
KNOWN = frozenset({*NEEDED, "model", "request_id", "stream", "cache_salt", "priority"})


class Generate:
    """Token ids in, token ids out; a dialect whose tokens are the client's own."""

    name = "generate"

    def read(self, body: Mapping[str, Any]) -> Asked:
        """The prompt's ids and the most tokens of the response; other sampling parameters are the session's."""
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, Mapping):
            raise Refused(400, "sampling_params", "is an object")
        if body.get("stream"):
            raise Refused(400, "stream", "answers to token ids come whole")
        if sampling.get("n", 1) != 1:
            raise Refused(400, "sampling_params.n", "one answer a call")
        most = sampling.get("max_tokens")
        if most is not None and (type(most) is not int or most < 1):
            raise Refused(400, "sampling_params.max_tokens", "is a number of tokens, from 1 on")
        pinned = (f"sampling_params.{name}" for name in sampling if name not in ("max_tokens", "n"))
        ignored = (*sorted(body.keys() - KNOWN), *sorted(pinned))
        return Asked((), max_tokens=most, prompt=read_ids("token_ids", body.get("token_ids")), ignored=ignored)

    def reply(self, answer: Answer, asked: Asked) -> dict[str, Any]:
        """The sampled ids with log-probabilities, and spans of the policy's versions."""
        call = answer.call
        sampled = call.response.loss_mask
        ids, logprobs = call.response.token_ids[sampled].tolist(), call.response.logprobs[sampled].tolist()
        content = [
            {"token_id": i, "logprob": p, "rank": None, "top_logprobs": []} for i, p in zip(ids, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": call.stop_reason,
            "logprobs": {"content": content},
            "weight_versions": _spans(answer.weight_versions),
        }
        return {"request_id": call.name, "choices": [choice]}

    def events(self, answer: Answer, asked: Asked) -> Iterator[bytes]:
        """None: `read` refuses a stream."""
        return iter(())

    def error(self, refused: Refused) -> dict[str, Any]:
        """As OpenAI's."""
        said = {"message": str(refused), "type": "invalid_request_error", "param": refused.field, "code": refused.code}
        return {"error": said}

    def error_event(self, refused: Refused) -> bytes:
        """Nothing: there is no stream."""
        return b""


def tokenize(chat: Chat, body: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    """The ids of a text, or of a conversation as the chat template renders it.

    Raises:
        Refused: there is neither.
        MessagesRefused: the template refuses the messages.
    """
    prompt, messages, tools = body.get("prompt"), body.get("messages"), body.get("tools") or ()
    if isinstance(prompt, str):
        ids = chat.encode(prompt)
    elif isinstance(messages, Sequence) and isinstance(tools, Sequence):
        ids = chat.prompt(read_messages(messages), tools)
    else:
        raise Refused(400, "prompt", "give a text as prompt, or messages")
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids.tolist()}


def read_ids(field: str, ids: Any) -> Int32s:
    """[P] ids that a client sent.

    Raises:
        Refused: they are no list of token ids.
    """
    most = np.iinfo(np.int32).max
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i <= most for i in ids):
        raise Refused(400, field, "give a list of token ids")
    return np.array(ids, np.int32)


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens `start:end` that one version sampled."""
    spans, start = [], 0
    for version, group in groupby(version for version in versions if version != NO_VERSION):
        end = start + sum(1 for _ in group)
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans
