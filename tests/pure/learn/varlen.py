"""The variable-length attention kernel on CPU, so that code and torch's compiler take the path of a GPU."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import varlen

from service.learn.device_batch import DeviceBatch
from service.learn.model import flash

COMPILER_WARNS = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
"""What torch's compiler warns about on its own way."""


class Row(NamedTuple):
    """A row's queries, keys and values [heads, T, head_dim], and its attention: causal, aligned at the end."""

    of_queries: slice
    of_keys: slice
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor


def attended(query: Tensor, key: Tensor, value: Tensor, bounds: Any, scale: float, window: list[int]) -> Iterator[Row]:
    """The rows one by one, by the bounds of queries and keys; `window`: keys before a query's own that it sees."""
    for of_queries, of_keys in zip(*([slice(*ends) for ends in pairwise(b.tolist())] for b in bounds), strict=True):
        each = query.shape[1] // key.shape[1]
        queries = query[of_queries].transpose(0, 1)
        keys, values = (x[of_keys].transpose(0, 1).repeat_interleave(each, 0) for x in (key, value))
        n_queries, n_keys = queries.shape[1], keys.shape[1]
        own = n_keys - n_queries
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1 + own)
        if window[0] >= 0:
            hidden |= torch.ones_like(hidden).tril(own - window[0] - 1)
        scores = (queries @ keys.mT * scale).masked_fill(hidden, -math.inf)
        yield Row(of_queries, of_keys, queries, keys, values, scores)


def forward_of_rows(
    query: Tensor, key: Tensor, value: Tensor, bounds: Any, scale: float, window: list[int]
) -> tuple[Tensor, Tensor]:
    """Output and [heads, T] logarithms of the sums of weights."""
    out, log_sum = torch.zeros_like(query), query.new_empty(query.shape[1], query.shape[0])
    for row in attended(query, key, value, bounds, scale, window):
        out[row.of_queries] = (row.scores.softmax(-1) @ row.values).transpose(0, 1)
        log_sum[:, row.of_queries] = row.scores.logsumexp(-1)
    return out, log_sum


def backward_of_rows(
    of_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, bounds: Any,
    scale: float, window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values."""
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    for row in attended(query, key, value, bounds, scale, window):
        of_row, out_row = (x[row.of_queries].transpose(0, 1) for x in (of_out, out))
        weights = (row.scores - log_sum[:, row.of_queries, None]).exp()
        of_scores = weights * (of_row @ row.values.mT - (of_row * out_row).sum(-1, keepdim=True)) * scale
        of_query[row.of_queries] = (of_scores @ row.keys).transpose(0, 1)
        for total, grouped in ((of_key, of_scores.mT @ row.queries), (of_value, weights.mT @ of_row)):
            total[row.of_keys] = grouped.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
    return of_query, of_key, of_value


class Flash4:
    """The two functions of flash-attn-4: those of its arguments that are used, and what it asserts about them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        """The name of each called function, and the lengths that it was told of the longest queries and keys."""

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **rows: Any) -> tuple[Any, ...]:
        assert return_lse
        return *forward_of_rows(q, k, v, *self._rows("_flash_attn_fwd", **rows)), None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, **rows: Any
    ) -> tuple[Tensor, ...]:
        assert lse.shape == (q.shape[1], q.shape[0])
        return backward_of_rows(dout, q, k, v, out, lse, *self._rows("_flash_attn_bwd", **rows))

    def _rows(
        self, name: str, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        softmax_scale: float, causal: bool, window_size_left: int | None, window_size_right: int | None,
    ) -> tuple[Any, float, list[int]]:  # fmt: skip
        self.calls.append((name, max_seqlen_q, max_seqlen_k))
        for ends, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
            assert ends.dtype == torch.int32 and int(ends.diff().max()) <= longest
        left = -1 if window_size_left is None else window_size_left
        assert causal == (left < 0) and window_size_right == (None if left < 0 else 0)
        return (cu_seqlens_q, cu_seqlens_k), softmax_scale, [left, 0]


def use_flash4(monkeypatch: pytest.MonkeyPatch) -> Flash4:
    """Let the operators of FlashAttention 4 compute on CPU, by a stand-in for the package."""
    kernels = Flash4()
    monkeypatch.setattr(flash, "_kernels", kernels)
    monkeypatch.setattr(flash, "takes", lambda query: True)
    return kernels


def register() -> None:
    """Give the two operators of the variable-length kernel an implementation on CPU."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
        given = (*others, *named.values())
        scale, window = (next(other for other in given if isinstance(other, kind)) for kind in (float, list))
        out, log_sum = forward_of_rows(query, key, value, others[:2], scale, window)
        return out, log_sum, torch.zeros(2, dtype=torch.uint64)

    def backward(of_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *others: Any) -> Any:
        scale, window = (next(other for other in others if isinstance(other, kind)) for kind in (float, list))
        return backward_of_rows(of_out, query, key, value, out, others[0], others[1:3], scale, window)

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture, differentiate and count graphs as for a GPU, without generating code for them."""
    torch._dynamo.reset()
    counters.clear()
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **said: original(module, backend="aot_eager", **said))


def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all micro-batches be for the variable-length kernel."""
    register()
    original = DeviceBatch.of
    monkeypatch.setattr(DeviceBatch, "of", lambda micro, said: original(micro, said._replace(variable_length=True)))
