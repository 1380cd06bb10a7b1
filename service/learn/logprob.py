"""Log-probabilities and entropies of chosen tokens, without ever holding the logits of more than a chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ENTRIES = 1 << 25
"""Logits held at once (128 MiB in float32)."""


def token_logprobs(
    hidden_MD: Tensor, head_VD: Tensor, token_ids_M: Tensor, temperature_M: Tensor, chunk_entries: int = CHUNK_ENTRIES
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and entropies of their distributions `softmax(logits / temperature)`, differentiable.

    Reduced in float32 (float64 for a float64 model), whatever type the logits are computed in.
    """
    rows = max(1, chunk_entries // head_VD.shape[0])
    inverse_M = temperature_M.reciprocal()
    result: tuple[Tensor, Tensor]
    result = _ChunkedLogprob.apply(hidden_MD, head_VD, token_ids_M, inverse_M, rows)  # type: ignore[no-untyped-call]
    return result


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type to reduce values of `dtype` in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, head: Tensor, inverse_temperature: Tensor) -> Tensor:
    logits = hidden @ head.t()
    return logits.to(wide(logits.dtype)) * inverse_temperature[:, None]


class _ChunkedLogprob(torch.autograd.Function):
    """Saves the hidden states and the log-normalisers; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, inverse_temperature: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        inverse_temperature = inverse_temperature.to(wide(hidden.dtype))
        logprob, entropy, normaliser = (inverse_temperature.new_empty(len(tokens)) for _ in range(3))
        for start in range(0, len(tokens), rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], head, inverse_temperature[part])
            normaliser[part] = logits.logsumexp(-1)
            logprob[part] = logits.gather(1, tokens[part, None])[:, 0] - normaliser[part]
            probability = (logits - normaliser[part, None]).exp_()
            # where: a logit of -inf has probability 0, and 0 * -inf would be NaN
            entropy[part] = normaliser[part] - torch.where(probability > 0, probability * logits, 0).sum(-1)
        ctx.save_for_backward(hidden, head, tokens, inverse_temperature, normaliser, entropy)
        ctx.rows = rows
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, head, tokens, inverse_temperature, normaliser, entropy = ctx.saved_tensors
        of_logprob, of_entropy = gradients
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=normaliser.dtype)
        for start in range(0, len(tokens), ctx.rows):
            part = slice(start, start + ctx.rows)
            logprobs = _logits(hidden[part], head, inverse_temperature[part]).sub_(normaliser[part, None])
            probability = logprobs.exp()
            # d entropy / d logit_v = -p_v (log p_v + entropy)
            surprise = torch.where(probability > 0, logprobs, 0).add_(entropy[part, None])
            of_logits = probability * -(of_logprob[part, None] + of_entropy[part, None] * surprise)
            of_logits.scatter_add_(1, tokens[part, None], of_logprob[part, None])
            of_logits = of_logits.mul_(inverse_temperature[part, None]).to(hidden.dtype)
            of_hidden[part] = of_logits @ head
            of_head += of_logits.t() @ hidden[part]
        return of_hidden, of_head.to(head.dtype), None, None, None
