"""Server-sent events and error bodies, as the dialects of OpenAI have them."""

from __future__ import annotations

import json
from typing import Any

from service.agents.dialects.types import Answer, Refused

DONE = b"data: [DONE]\n\n"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def frame(data: Any, event: str = "") -> bytes:
    """One server-sent event; JSON as `data` has no line break."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def openai_error(refused: Refused) -> dict[str, Any]:
    """The body of an error in chat completions, completions and responses."""
    kind = "server_error" if refused.status >= 500 else ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.field, "code": refused.code}}


def openai_error_event(refused: Refused) -> bytes:
    """The end of a stream of chat completions or completions that failed."""
    return frame(openai_error(refused)) + DONE


def sampled(answer: Answer) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of the tokens that the policy sampled, without an appended end."""
    response = answer.call.response
    return response.token_ids[response.loss_mask].tolist(), response.logprobs[response.loss_mask].tolist()


def prompt_ids(answer: Answer) -> list[int]:
    """The ids of the whole prompt."""
    whole = answer.call.token_ids()
    ids: list[int] = whole[: len(whole) - len(answer.call.response.token_ids)].tolist()
    return ids


def usage(answer: Answer) -> dict[str, int]:
    """The numbers of tokens in chat completions and completions."""
    n_sampled = int(answer.call.response.loss_mask.sum())
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": n_sampled,
        "total_tokens": answer.prompt_tokens + n_sampled,
    }
