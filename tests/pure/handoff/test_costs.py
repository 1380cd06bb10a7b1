"""What steps cost grows with their tokens: four times as many take about four times as long, however they branch."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.columns import digest
from service.handoff.prefixes.merge import merge
from service.handoff.prefixes.sharing import check_references
from service.handoff.steps.tables import steps_table
from service.types import Extension, Int32s, Step, Steps
from tests.pure.handoff.worlds import step

NEW = 40
"""Tokens that each step brings: half of them prompt."""

FEW, MANY = 250, 1000
ALLOWED = 9
"""Linear work grows by 4, quadratic work by 16."""

Shape = Callable[[int], tuple[int, int]]
"""Of a step: the step that it extends, and how many of that one's last tokens it drops; step -1: all tokens."""


def chain_with_one_fork(index: int) -> tuple[int, int]:
    return index - 1, NEW // 4 if index == 10 else 0


def resets(index: int) -> tuple[int, int]:
    return 0, NEW // 2


def comb(index: int) -> tuple[int, int]:
    return index - 1, NEW // 4


def episode(shape: Shape, count: int) -> Steps:
    """A trajectory whose steps refer to earlier ones."""
    rng, wholes, made = np.random.default_rng(0), list[Int32s](), list[Step]()
    for index in range(count):
        own = rng.integers(0, 1000, NEW, np.int32)
        parent, dropped = shape(index) if index else (-1, 0)
        kept = wholes[parent][: len(wholes[parent]) - dropped] if index else own[:0]
        now = step(index, own[: NEW // 2].tolist(), own[NEW // 2 :].tolist())
        if index:
            now = replace(now, extends=Extension(parent, len(kept), digest(kept)))
        made.append(now)
        wholes.append(np.concatenate((kept, own)))
    return steps_table(made)


def grows_like_the_tokens(prepare: Callable[[int], Any], work: Callable[[Any], Any]) -> bool:
    """Whether the work grows no faster than the number of steps, from FEW to MANY.

    The least of several tries each: what else the machine does only ever adds, to the shorter work too.
    """
    inputs, seconds = (prepare(FEW), prepare(MANY)), [math.inf, math.inf]
    for tries in range(20):
        for size, given in enumerate(inputs):
            start = time.process_time()
            work(given)
            seconds[size] = min(seconds[size], time.process_time() - start)
        if tries > 1 and seconds[1] < ALLOWED * seconds[0]:
            return True
    return False


@pytest.mark.parametrize(
    ("shape", "mode", "rows"),
    [
        (chain_with_one_fork, "linear", 2),
        (chain_with_one_fork, "tree", 2),
        (resets, "tree", MANY),
    ],
)
def test_merging_costs_what_the_new_tokens_cost(shape: Shape, mode: Any, rows: int) -> None:
    assert merge(episode(shape, MANY), mode).counts["rows"] == rows
    assert grows_like_the_tokens(lambda count: episode(shape, count), lambda steps: merge(steps, mode))


@pytest.mark.parametrize("shape", [chain_with_one_fork, resets, comb])
def test_checking_references_costs_what_the_new_tokens_cost(shape: Shape) -> None:
    assert grows_like_the_tokens(
        lambda count: episode(shape, count), lambda steps: check_references((steps, k) for k in range(len(steps)))
    )
