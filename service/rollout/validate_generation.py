"""Checks of an engine's answer before a step is built from it.

max_tokens 4    ids [8 9 2]   log-probabilities [-.1 -.4 -.2]   versions [7 7 8]    valid
                ids [8 9 2]   log-probabilities [-.1 -.4]       versions [7 7 8]    refused
"""

from __future__ import annotations

import numpy as np

from service.handoff.steps.stop_reason import StopReason
from service.handoff.validate import LOGPROB_TOLERANCE
from service.rollout.engine import Generation

ENDS = (StopReason.STOP, StopReason.LENGTH)


def validate_generation(answer: Generation, prompt_length: int, max_tokens: int, vocab_size: int) -> str | None:
    """What is wrong with an engine's answer; None where nothing is.

    Single log-probabilities of NaN or minus infinity are valid: the buffer masks and counts such tokens.
    """
    n_tokens = len(answer.token_ids)
    if answer.stop_reason not in ENDS:
        return f"the turn ended for the reason {answer.stop_reason!r}"
    if n_tokens > max_tokens:
        return f"{n_tokens} tokens, {max_tokens} were asked for"
    for name, column in (("log-probabilities", answer.logprobs), ("versions", answer.versions)):
        if column.shape != (n_tokens,):
            return f"{_shape(column)} {name} for {n_tokens} tokens"
    experts = answer.routed_experts
    if experts is not None and (experts.ndim != 3 or len(experts) > prompt_length + n_tokens or 0 in experts.shape[1:]):
        return f"{_shape(experts)} routed experts for {prompt_length} + {n_tokens} tokens"
    if not n_tokens:
        ended = answer.sampled_end or answer.stop_reason == StopReason.LENGTH
        return f"no token, but the end {answer.stop_reason!r}" if ended else None
    return _bad_value(answer, vocab_size)


def _bad_value(answer: Generation, vocab_size: int) -> str | None:
    low, high = int(answer.token_ids.min()), int(answer.token_ids.max())
    if low < 0 or high >= vocab_size:
        return f"the token {low if low < 0 else high} of a vocabulary of {vocab_size}"
    if answer.versions.min() < 0:
        return "tokens of no policy version"
    largest = np.fmax.reduce(answer.logprobs)  # NaN only where all are NaN
    if largest > LOGPROB_TOLERANCE:
        return f"the log-probability {largest:g}"
    if len(answer.token_ids) > 1 and not np.isfinite(answer.logprobs).any():
        return "no finite log-probability"
    return None


def _shape(column: np.ndarray) -> str:
    return " x ".join(map(str, column.shape))
