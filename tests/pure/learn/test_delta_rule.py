"""Linear attention of packed rows is that of each row by itself."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from service.learn.attention_layout import CHUNK, Chunks
from service.learn.model.delta_net import EPSILON, gated_delta_rule
from tests.pure.learn.builders import CPU

HEADS, KEYS, VALUES = 2, 6, 5


def made(n_tokens: int, seed: int) -> list[Tensor]:
    """Queries, keys, values, log decay and beta."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(n_tokens, HEADS, KEYS)] * 2 + [(n_tokens, HEADS, VALUES)] + [(n_tokens, HEADS)] * 2
    query, key, value, g, beta = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return [query, key, value, -g.exp(), beta.sigmoid()]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of one row."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (query, key))
    state, out = query.new_zeros(HEADS, KEYS, VALUES), []
    for t in range(len(query)):
        state = state * g[t, :, None, None].exp()
        missing = value[t] - (state * key[t, :, :, None]).sum(1)
        state = state + key[t, :, :, None] * (missing * beta[t, :, None])[:, None]
        out.append((state * query[t, :, :, None]).sum(1) * KEYS**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("lengths", [[5, CHUNK, 70, 1, 2 * CHUNK + 2], [1], [CHUNK - 1, CHUNK + 1], [3] * 9], ids=str)
def test_output_and_gradients_are_those_of_the_recurrence_row_by_row(lengths: list[int]) -> None:
    offsets = np.cumsum([0, *lengths])
    ours, own = ([x.requires_grad_() for x in made(int(offsets[-1]), 1)] for _ in range(2))
    found = gated_delta_rule(*ours, Chunks.of(offsets, CPU))
    expected = torch.cat([token_by_token(*(x[start:stop] for x in own)) for start, stop in pairwise(offsets.tolist())])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = [torch.autograd.grad((out * weight).sum(), x) for out, x in ((found, ours), (expected, own))]
    torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-11)
