"""Groups in an engine: fewer while its KV cache overflows, more again when there is room."""

import pytest

from actors.engine.engine_load import UNREPORTED, EngineLoad, Overflows
from actors.generator.group_limit import GroupLimit


def load(kv_cache_ratio: float = 0.5, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=10, waiting=0, kv_cache_ratio=kv_cache_ratio, preemptions=preemptions)


@pytest.mark.parametrize(
    ("most", "looks", "limits"),
    [
        (8, [(0.99, 0), (0.1, 0)], [8, 8]),
        (8, [(1.0, preemptions) for preemptions in range(1, 8)], [6, 4, 3, 2, 1, 1, 1]),
        (8, [(1.0, 5), (0.9, 5)], [6, 6]),
        (4, [(1.0, 5), (0.5, 5), (0.5, 5), (0.5, 5), (0.5, 6)], [3, 4, 4, 4, 3]),
    ],
    ids=["as configured", "a quarter fewer, never none", "old preemptions do not count", "back one by one"],
)
def test_each_look_with_new_preemptions_closes_groups_and_room_opens_them_again(
    most: int, looks: list[tuple[float, int]], limits: list[int]
) -> None:
    limit = GroupLimit(most)
    assert [limit.observe(load(*look), limit.groups) for look in looks] == limits


def test_a_limit_that_does_not_bind_is_not_raised() -> None:
    limit = GroupLimit(8)
    limit.observe(load(1.0, preemptions=1), 8)
    assert limit.observe(load(0.2, preemptions=1), 2) == 6


def test_overflows_amid_updates_are_counted_exactly_though_preemptions_are_reported_late() -> None:
    overflows = Overflows()
    for running, reported in ((64, (40, 0, 24)), (62, (0, 62, 2)), (59, (64,)), (64, (2, 62))):
        overflows.updated(running, waiting=64 - running)  # those that wait were preempted by a full cache before
        for n in reported:
            overflows.reported(n)
    assert overflows.preemptions == 2 + 5


def test_requests_that_were_cancelled_after_an_update_hide_few_overflows() -> None:
    overflows = Overflows()
    overflows.updated(running=64, waiting=0)  # all are cancelled before their next token
    overflows.updated(running=2, waiting=0)
    for _ in range(2 * UNREPORTED + 1):
        overflows.reported(1)
    assert overflows.preemptions == 1
