"""The output head alone: log-probabilities and entropies of loss tokens and their gradients, compiled and eager."""

from __future__ import annotations

from unittest.mock import patch

import torch

from benchmarks.gpu.expected import head_seconds
from benchmarks.gpu.figures import Range, line, not_run
from benchmarks.gpu.parts import Give
from benchmarks.gpu.steps import seconds_of
from service.learn import compile
from service.learn.model.logprob import token_logprobs

SIZES = {"cuda": (8192, 1024, 151936), "cpu": (8, 16, 100)}
"""Loss tokens, hidden size and vocabulary of a micro-batch of Qwen3-0.6B."""


def measure(device: str, give: Give) -> None:
    """Measure the microseconds per loss token."""
    there, (tokens, hidden, vocabulary) = torch.device(device), SIZES[device]
    states, head = (
        torch.randn(n, hidden, dtype=torch.bfloat16, device=there).requires_grad_() for n in (tokens, vocabulary)
    )
    ids, ones = torch.zeros(tokens, dtype=torch.int64, device=there), torch.ones(tokens, device=there)

    def both_passes() -> None:
        found = token_logprobs(states, head, ids, ones)
        torch.autograd.backward([found.logprob_M, found.entropy_M], [ones, ones])
        states.grad = head.grad = None

    for compiled in (True, False):
        name = f"head, {'compiled' if compiled else 'not compiled'}"
        if compiled and not compile.compiler_works(there):
            give(not_run(name, "the machine's compiler does not work"))
            continue
        with patch.object(compile, "compiler_works", lambda _, works=compiled: works):
            seconds = seconds_of(there, both_passes) / tokens
        low, high = head_seconds(tokens, hidden, vocabulary, compiled)
        give(line(name, 1e6 * seconds, "us a loss token", Range(1e6 * low, 1e6 * high)))
