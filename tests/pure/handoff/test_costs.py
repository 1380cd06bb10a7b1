"""What steps cost grows with their tokens: four times as many take about four times as long, however they branch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.columns import digest
from service.handoff.batches.pack import Layout, place
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


def two_agents(index: int) -> tuple[int, int]:
    return (index - 2 if index > 2 else 0), 0


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


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def growth(prepare: Callable[[int], Callable[[], Any]]) -> float:
    """By what factor the work grows from FEW steps to MANY.

    The least of several tries each: what else the machine does only ever adds, to the shorter work too.
    """
    few, many = prepare(FEW), prepare(MANY)
    tries = list[tuple[float, float]]()
    while len(tries) < 3 or (len(tries) < 20 and _grown(tries) >= ALLOWED):
        tries.append((cpu_seconds(few), cpu_seconds(many)))
    return _grown(tries)


def _grown(tries: list[tuple[float, float]]) -> float:
    short, long = map(min, zip(*tries, strict=True))
    return long / short


@pytest.mark.parametrize(
    ("shape", "mode", "rows"),
    [
        (chain_with_one_fork, "linear", 2),
        (chain_with_one_fork, "tree", 2),
        (two_agents, "tree", 2),
        (resets, "linear", MANY),
        (resets, "tree", MANY),
    ],
)
def test_merging_costs_what_the_new_tokens_cost(shape: Shape, mode: Any, rows: int) -> None:
    assert merge(episode(shape, MANY), mode).counts["rows"] == rows

    def prepared(count: int) -> Callable[[], Any]:
        steps = episode(shape, count)
        return lambda: merge(steps, mode)

    assert growth(prepared) < ALLOWED


@pytest.mark.parametrize("shape", [chain_with_one_fork, two_agents, resets, comb])
def test_checking_references_costs_what_the_new_tokens_cost(shape: Shape) -> None:
    def prepared(count: int) -> Callable[[], Any]:
        steps = episode(shape, count)
        return lambda: check_references((steps, k) for k in range(count))

    assert growth(prepared) < ALLOWED


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_placing_rows_of_which_hardly_two_fit_a_micro_batch_costs_what_the_rows_cost(layout: Layout) -> None:
    def prepared(count: int) -> Callable[[], Any]:
        length_R = np.random.default_rng(0).integers(400, 700, 8 * count)
        return lambda: place(length_R, np.arange(8 * count, dtype=np.int32), 2, 1000, layout)

    assert growth(prepared) < ALLOWED
