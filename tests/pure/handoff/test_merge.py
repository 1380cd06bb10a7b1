from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.columns import widened
from service.handoff.prefixes.merge import Mode, merge, merge_steps
from service.handoff.prefixes.sharing import PrefixError, shared_form
from service.handoff.steps.tables import steps_table
from service.types import NO_VERSION, ROUTE_NATIVELY, Extension
from tests.pure.handoff.worlds import ids, shared, step

EXAMPLE = [
    step(0, [10, 20, 30], [40, 50], reward=0.5),
    step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90], reward=1.0),
]


def test_a_step_that_extends_its_predecessor_shares_its_row() -> None:
    [row] = merge_steps(EXAMPLE)
    assert row.prompt_ids.tolist() == [10, 20, 30]
    assert row.response_ids.tolist() == [40, 50, 60, 70, 80, 90]
    assert row.loss_mask.tolist() == [True, True, False, False, True, True]
    assert row.logprobs is not None and row.logprobs.tolist() == [-0.125, -0.25, 0, 0, -1.125, -1.25]
    assert row.versions.tolist() == [0, 0, NO_VERSION, NO_VERSION, 0, 0]
    assert (row.first_step, row.last_step, row.reward) == (0, 1, 1.0)


@pytest.mark.parametrize("mode", ["linear", "tree"])
def test_a_prompt_continues_only_a_step_whose_tokens_it_repeats(mode: Mode) -> None:
    steps = [step(0, [1, 2], [3, 4]), step(1, [1, 2, 3, 9, 5], [6]), step(2, [1, 2, 3, 9, 5, 6, 7], [8])]
    counts = merge(steps_table(shared_form(steps)), mode).counts
    assert (counts["extended"], counts["forked"], counts["rows"]) == (1, 1, 2)
    assert merge(steps_table(shared_form([steps[0], replace(steps[2], index=1)])), mode).counts["forked"] == 1


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_routed_experts_stay_aligned_and_observations_route_natively(dtype: type[np.generic]) -> None:
    steps = [
        replace(s, routed_experts=np.full((len(s.prompt_ids) + len(s.response_ids), 2, 3), s.index, dtype))
        for s in EXAMPLE
    ]
    [row] = merge_steps(steps)
    assert row.routed_experts is not None and row.routed_experts.shape == (9, 2, 3)
    assert row.routed_experts.dtype == dtype
    assert widened(row.routed_experts)[:, 0, 0].tolist() == [0, 0, 0, 0, 0, ROUTE_NATIVELY, ROUTE_NATIVELY, 1, 1]


def test_a_reference_to_other_tokens_is_an_error() -> None:
    wrong = replace(shared(EXAMPLE)[1], extends=Extension(0, 5, 12345))
    with pytest.raises(PrefixError, match="step=1 extends other tokens"):
        merge_steps([EXAMPLE[0], wrong])
    with pytest.raises(PrefixError, match="not there"):
        merge_steps([EXAMPLE[0], replace(wrong, extends=Extension(3, 5, 12345))])


def test_a_conflicting_duplicate_is_refused() -> None:
    with pytest.raises(ValueError, match="came twice"):
        merge_steps([EXAMPLE[0], replace(EXAMPLE[0], response_ids=ids(40, 51))])
