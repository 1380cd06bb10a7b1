"""`/inference/v1/generate`, in vLLM's form, for clients that send and receive token ids.

{"token_ids": [1 2 3], "sampling_params": {"max_tokens": 8}}  ->  {"choices": [{"token_ids": [4 5], "logprobs": ...}]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from service.agents.dialects.body import Positive, TokenIds, Truncation, guided, ignored_fields, read_request
from service.agents.dialects.dialect import CallAnswer, CallRequest, Dialect
from service.types import NO_VERSION


class _Sampling(Truncation, kw_only=True):
    max_tokens: Positive | None = None


class _GenerateRequest(Struct, kw_only=True):
    token_ids: TokenIds
    sampling_params: dict[str, Any] | None = None
    model: str | None = None
    stream: Literal[False] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


def read(body: Mapping[str, Any]) -> CallRequest:
    """Read the prompt's ids, the maximum number of response tokens, and `top_p`, `top_k` and `min_p`."""
    request = read_request(body, _GenerateRequest)
    sampling = read_request(request.sampling_params or {}, _Sampling, "sampling_params")
    return CallRequest(
        messages=(),
        prompt=np.array(request.token_ids, np.int32),
        max_tokens=sampling.max_tokens,
        truncation=sampling.truncation,
        forms=guided(request.sampling_params or {}),
        ignored=(*ignored_fields(body, _GenerateRequest), *ignored_fields(request.sampling_params or {}, _Sampling)),
    )


def reply(answer: CallAnswer, asked: CallRequest) -> dict[str, Any]:
    """The answer: the sampled ids with log-probabilities, and the spans of ids that one policy version sampled."""
    ids, logprobs = answer.sampled()
    content: list[dict[str, Any]] = [
        {"token_id": i, "token": f"token_id:{i}", "logprob": p, "rank": None, "top_logprobs": []}
        for i, p in zip(ids, logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": answer.call.stop_reason,
        "logprobs": {"content": content},
        "weight_versions": _spans(answer.call.response.versions.tolist()),
    }
    return {"request_id": answer.call.name, "choices": [choice]}


def events(answer: CallAnswer, asked: CallRequest) -> Iterator[bytes]:
    """Yield nothing: an answer in this API is never streamed, because `read` refuses requests for streams."""
    return iter(())


def _spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Spans `start:end` of the sampled tokens: one for each sequence of tokens that the same version sampled."""
    spans, start = [], 0
    for version, group in groupby(version for version in versions if version != NO_VERSION):
        end = start + sum(1 for _ in group)
        spans.append({"version": str(version), "start": start, "end": end})
        start = end
    return spans


GENERATE = Dialect("generate", read, reply, events)
