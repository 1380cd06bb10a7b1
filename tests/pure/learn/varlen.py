"""The variable-length attention kernel on CPU, so that code and torch's compiler take the path of a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen


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


def register() -> None:
    """Give the two operators of the variable-length kernel an implementation on CPU."""

    def forward(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
        given = (*others, *named.values())
        scale, window = (next(other for other in given if isinstance(other, kind)) for kind in (float, list))
        out, log_sum = torch.zeros_like(query), query.new_zeros(query.shape[1], query.shape[0])
        for row in attended(query, key, value, others[:2], scale, window):
            out[row.of_queries] = (row.scores.softmax(-1) @ row.values).transpose(0, 1)
            log_sum[:, row.of_queries] = row.scores.logsumexp(-1)
        return out, log_sum, torch.zeros(2, dtype=torch.uint64)

    def backward(of_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *others: Any) -> Any:
        scale, window = (next(other for other in others if isinstance(other, kind)) for kind in (float, list))
        of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
        log_sum, *bounds = others[:3]
        for row in attended(query, key, value, bounds, scale, window):
            of_row, out_row = (x[row.of_queries].transpose(0, 1) for x in (of_out, out))
            weights = (row.scores - log_sum[:, row.of_queries, None]).exp()
            of_scores = weights * (of_row @ row.values.mT - (of_row * out_row).sum(-1, keepdim=True)) * scale
            of_query[row.of_queries] = (of_scores @ row.keys).transpose(0, 1)
            for total, grouped in ((of_key, of_scores.mT @ row.queries), (of_value, weights.mT @ of_row)):
                total[row.of_keys] = grouped.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
        return of_query, of_key, of_value

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture and differentiate graphs as for a GPU, without generating code for them."""
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **said: original(module, backend="aot_eager", **said))
