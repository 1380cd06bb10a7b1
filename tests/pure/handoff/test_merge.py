from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.columns import widened
from service.handoff.prefixes.merge import merge_steps
from service.handoff.prefixes.sharing import PrefixError
from service.types import ROUTE_NATIVELY, Extension
from tests.pure.handoff.worlds import shared, step

EXAMPLE = [
    step(0, [10, 20, 30], [40, 50], reward=0.5),
    step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90], reward=1.0),
]


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
