"""Whether two records of one step mean the same, in whatever form each came.

    full      prompt [10 20 30 40 50 60 70]                response [80 90]
    extends   step 0 by 5 tokens, prompt [60 70]           response [80 90]      the same step

A reference names the tokens before it by their digest, so a full record is compared with it without looking at the
step that it extends. Only two references of different lengths need the tokens that one of them extends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.handoff.prefixes.digest import digest
from service.types import ROUTE_NATIVELY, Float32s, Int32s, Steps

Tokens = Callable[[int], Int32s | None]
"""Whole prompt and response of an earlier step of the trajectory, by its index; None when they are not known."""

_ALIKE = ("group_id_K", "sample_K", "attempt_K", "index_K", "temperature_K", "has_logprobs_K")
_OF_RESPONSE = ("logprobs_N", "loss_mask_N", "versions_N")


def same_step(a: Steps, k: int, b: Steps, j: int, tokens: Tokens) -> bool | None:
    """Whether item `k` of `a` and item `j` of `b` mean the same; None when that cannot be told yet."""
    if _reference(a, k)[1] > _reference(b, j)[1]:
        a, k, b, j = b, j, a, k
    if not _alike(a, k, b, j):
        return False
    (parent, length, before), (other_parent, other_length, other_before) = _reference(a, k), _reference(b, j)
    if length == other_length:
        return before == other_before
    lacks = _own(a, k, "token_ids_N")[: other_length - length]  # what `b` refers to and `a` carries
    if not length:
        return digest(lacks) == other_before
    if (known := tokens(parent)) is not None and digest(known[:length]) == before:
        return digest(np.concatenate((known[:length], lacks))) == other_before
    if (known := tokens(other_parent)) is not None and digest(known[:other_length]) == other_before:
        return digest(known[:length]) == before and bool((known[length:other_length] == lacks).all())
    return None


def _reference(steps: Steps, k: int) -> tuple[int, int, int]:
    return int(steps.extends_K[k]), int(steps.extends_length_K[k]), int(steps.extends_digest_K[k])


def _alike(a: Steps, k: int, b: Steps, j: int) -> bool:
    """Everything but the tokens that one of them refers to; bit by bit, so that a NaN equals itself."""
    if any(getattr(a, name)[k] != getattr(b, name)[j] for name in _ALIKE):
        return False
    if _names(a, k) != _names(b, j) or _lengths(a, k) != _lengths(b, j) or not _same_rewards(a, k, b, j):
        return False
    own, response = len(_own(b, j, "token_ids_N")), _lengths(b, j)[1]  # `b` carries no more than `a`
    return (
        _same_bits(_last(a, k, "token_ids_N", own), _last(b, j, "token_ids_N", own))
        and all(_same_bits(_last(a, k, name, response), _last(b, j, name, response)) for name in _OF_RESPONSE)
        and _same_experts(_experts(a, k, own), _experts(b, j, own))
    )


def _names(steps: Steps, k: int) -> tuple[str, str]:
    return steps.uids[steps.uid_K[k]], steps.stop_reasons[steps.stop_reason_K[k]]


def _lengths(steps: Steps, k: int) -> tuple[int, int]:
    """Tokens of the whole prompt with the response, and of the response."""
    own = int(steps.offsets_K[k + 1] - steps.offsets_K[k])
    return own + int(steps.extends_length_K[k]), own - int(steps.prompt_length_K[k])


def _own(steps: Steps, k: int, name: str) -> NDArray[Any]:
    column: NDArray[Any] = getattr(steps, name)[steps.offsets_K[k] : steps.offsets_K[k + 1]]
    return column


def _last(steps: Steps, k: int, name: str, count: int) -> NDArray[Any]:
    own = _own(steps, k, name)
    return own[len(own) - count :]


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


def _same_rewards(a: Steps, k: int, b: Steps, j: int) -> bool:
    """A scalar says the same as that number on the last token of the response."""
    if a.token_rewards_N is None and b.token_rewards_N is None:
        return bool(a.reward_K[k] == b.reward_K[j])
    response = _lengths(a, k)[1]
    return _same_bits(_token_rewards(a, k, response), _token_rewards(b, j, response))


def _token_rewards(steps: Steps, k: int, response: int) -> Float32s:
    if steps.token_rewards_N is not None:
        return _last(steps, k, "token_rewards_N", response) + np.float32(0)  # -0.0 is 0.0
    rewards_T = np.zeros(response, np.float32)
    rewards_T[-1:] = steps.reward_K[k]
    return rewards_T + np.float32(0)


def _experts(steps: Steps, k: int, count: int) -> NDArray[np.int16] | None:
    return None if steps.routed_experts_N is None else _last(steps, k, "routed_experts_N", count)


def _same_experts(a: NDArray[np.int16] | None, b: NDArray[np.int16] | None) -> bool:
    """None at all says the same as none recorded on any token."""
    if a is None or b is None:
        known = b if a is None else a
        return known is None or bool((known == ROUTE_NATIVELY).all())
    return a.shape == b.shape and bool((a == b).all())
