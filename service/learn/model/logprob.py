"""Log-probabilities and entropies of chosen tokens. Logits are in memory for only one chunk of tokens at a time.

Axes: `M` tokens that carry loss, `D` hidden size, `V` vocabulary, `U` ids of supports.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.learn.compile import compiled_on_gpu
from service.learn.device_batch import Support

CHUNK_ENTRIES = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Number of logits in one chunk: 32 MiB of float32 on CPU; 1 GiB on a GPU, where only large matrix products are
fast."""


class TokenLogprobs(NamedTuple):
    """The model's output for the tokens that carry loss."""

    logprob_M: Tensor
    entropy_M: Tensor


def token_logprobs(
    hidden_MD: Tensor,
    head_VD: Tensor,
    token_ids_M: Tensor,
    temperature_M: Tensor,
    chunk_entries: int | None = None,
    support: Support | None = None,
) -> TokenLogprobs:
    """For each token that carries loss, its log-probability, and the entropy of the distribution that predicts it,
    `softmax(logits / temperature)` over the token's support. Both are differentiable.

    Sums are taken in float32 (float64 for a float64 model), whatever the type of the logits.
    """
    entries = chunk_entries or CHUNK_ENTRIES["cuda" if hidden_MD.is_cuda else "cpu"]
    rows = max(1, entries // head_VD.shape[0])
    inverse_M = temperature_M.reciprocal()
    logprob_M, entropy_M = _ChunkedLogprob.apply(  # type: ignore[no-untyped-call]
        hidden_MD, head_VD, token_ids_M, inverse_M, rows, support
    )
    return TokenLogprobs(logprob_M, entropy_M)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type for sums of values of type `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _product(left: Tensor, right: Tensor) -> Tensor:
    """A matrix product in the accumulation type; on a GPU the result is not rounded to bfloat16 first."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(accumulation_dtype(left.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a sum in the accumulation type, if possible in one kernel without memory for the
    product."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and left.dtype == torch.bfloat16 and _adds_in_float32(left.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _product(left, right)


@cache
def _adds_in_float32(device: torch.device) -> bool:
    """Whether a bfloat16 product can be added to a float32 sum in one kernel; older torch refuses such a sum."""
    total, ones = torch.ones(16, 16, device=device), torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())


@compiled_on_gpu
def statistics(logits: Tensor, tokens: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of logits: the log-probability of its token, its entropy, and its log-normaliser."""
    scaled = logits * inverse_temperature[:, None]
    normaliser = scaled.logsumexp(-1)
    logprob = scaled.gather(1, tokens[:, None])[:, 0] - normaliser
    probability = (scaled - normaliser[:, None]).exp()
    # `where`, because a logit of -inf has probability 0, and 0 * -inf would be NaN
    entropy = normaliser - torch.where(probability > 0, probability * scaled, 0).sum(-1)
    return logprob, entropy, normaliser


@compiled_on_gpu
def logit_gradient(
    logits: Tensor,
    dtype: torch.dtype,
    tokens: Tensor,
    inverse_temperature: Tensor,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
) -> Tensor:
    """Gradient of `of_logprob * logprob + of_entropy * entropy` with respect to the logits, returned as `dtype`.

    d logprob / d logit_v = [v is the token] - p_v;    d entropy / d logit_v = -p_v (log p_v + entropy)
    """
    logprobs = logits * inverse_temperature[:, None] - normaliser[:, None]
    probability = logprobs.exp()
    surprise = torch.where(probability > 0, logprobs, 0) + entropy[:, None]
    gradient = -probability * (of_logprob[:, None] + of_entropy[:, None] * surprise)
    is_token = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
    gradient = torch.where(is_token, gradient + of_logprob[:, None], gradient)
    return (gradient * inverse_temperature[:, None]).to(dtype)


def _supported(logits: Tensor, tokens: Tensor, support: Support | None, part: slice) -> Tensor:
    """The logits of some tokens, in place: minus infinity outside of each token's support."""
    if support is None:
        return logits
    row_X = torch.arange(len(logits), device=logits.device)
    offsets = support.offsets_M[part.start : part.stop + 1]
    lengths = offsets.diff().to(logits.device, non_blocking=True)
    row_U = torch.repeat_interleave(row_X, lengths, output_size=int(offsets[-1] - offsets[0]))
    row = torch.cat((row_X, row_U))
    column = torch.cat((tokens[part], support.ids_U[int(offsets[0]) : int(offsets[-1])].long()))
    kept = logits[row, column]
    logits.masked_fill_(support.truncated_M[part, None], -torch.inf)
    logits[row, column] = kept
    return logits


class _ChunkedLogprob(torch.autograd.Function):
    """Saves the hidden states and the log-normalisers; the backward pass recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        tokens: Tensor,
        inverse_temperature: Tensor,
        rows: int,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        inverse_temperature = inverse_temperature.to(accumulation_dtype(hidden.dtype))
        logprob, entropy, normaliser = (torch.empty_like(inverse_temperature) for _ in range(3))
        for start in range(0, len(tokens), rows):
            part = slice(start, start + rows)
            logits = _supported(_product(hidden[part], head.t()), tokens, support, part)
            found = statistics(logits, tokens[part], inverse_temperature[part])
            logprob[part], entropy[part], normaliser[part] = found
        ctx.save_for_backward(hidden, head, tokens, inverse_temperature, normaliser, entropy)
        ctx.rows, ctx.support = rows, support
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, head, *of_tokens = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]
        of_head = torch.zeros_like(head, dtype=accumulation_dtype(head.dtype)) if is_trained else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = _supported(_product(hidden[part], head.t()), of_tokens[0], ctx.support, part)
            of_logits = logit_gradient(logits, hidden.dtype, *(value[part] for value in (*of_tokens, *gradients)))
            of_hidden[part] = of_logits @ head
            if of_head is not None:
                _add_product(of_head, of_logits.t(), hidden[part])
        return of_hidden, None if of_head is None else of_head.to(head.dtype), None, None, None, None
