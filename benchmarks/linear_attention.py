"""Cost of packed linear attention by the length of the rows: `python -m benchmarks.linear_attention`.

Measures the CPU time of convolution and gated delta rule, forward and backward, on packed rows with the same total
number of tokens: one thread, the minimum of several repetitions.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from service.learn.chunk_layout import Chunks
from service.learn.model.delta_rule import causal_convolution, gated_delta_rule

TOKENS, HEADS, DIMENSION, TAPS = 8192, 4, 128, 4
LENGTHS = (128, 512, 2048, 8192)
REPETITIONS = 2


def seconds(length: int) -> float:
    """CPU seconds of a forward and a backward pass over rows of this length."""
    chunks = Chunks.of(np.arange(0, TOKENS + 1, length), torch.device("cpu"))
    mixed = torch.randn(TOKENS, 3 * HEADS * DIMENSION, requires_grad=True)
    weight = torch.randn(3 * HEADS * DIMENSION, TAPS, requires_grad=True)
    g, beta = -torch.rand(TOKENS, HEADS), torch.rand(TOKENS, HEADS)

    def once() -> float:
        start = time.process_time()
        query, key, value = causal_convolution(mixed, weight, chunks).view(TOKENS, 3, HEADS, DIMENSION).unbind(1)
        out: Tensor = gated_delta_rule(query, key, value, g, beta, chunks)
        out.sum().backward()  # type: ignore[no-untyped-call]
        return time.process_time() - start

    return min(once() for _ in range(REPETITIONS))


def main() -> None:
    """Print the cost per token of each length, and relative to the cheapest."""
    torch.set_num_threads(1)
    cost = {length: seconds(length) / TOKENS for length in LENGTHS}
    for length, of_token in cost.items():
        print(f"rows of {length:>5} tokens   {1e6 * of_token:6.1f} us a token   {of_token / min(cost.values()):.2f}")


if __name__ == "__main__":
    main()
