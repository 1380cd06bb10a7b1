"""Groups in an engine: fewer while its KV cache overflows, more again when there is room."""

from actors.generator.group_limit import EngineLoad, GroupLimit


def load(kv_cache_ratio: float = 0.5, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=10, waiting=0, kv_cache_ratio=kv_cache_ratio, preemptions=preemptions)


def test_without_preemptions_as_many_groups_are_open_as_configured() -> None:
    limit = GroupLimit(8)
    assert [limit.observe(load(0.99), 8), limit.observe(load(0.1), 8)] == [8, 8]


def test_each_look_that_finds_new_preemptions_takes_a_quarter_away_but_never_the_last_group() -> None:
    limit = GroupLimit(8)
    assert [limit.observe(load(1.0, preemptions), limit.groups) for preemptions in range(1, 8)] == [6, 4, 3, 2, 1, 1, 1]


def test_old_preemptions_are_not_held_against_an_engine() -> None:
    limit = GroupLimit(8)
    limit.observe(load(1.0, preemptions=5), 8)
    assert limit.observe(load(0.9, preemptions=5), 6) == 6


def test_with_room_in_the_cache_groups_come_back_one_by_one() -> None:
    limit = GroupLimit(4)
    limit.observe(load(1.0, preemptions=5), 4)
    assert [limit.observe(load(0.5, preemptions=5), limit.groups) for _ in range(3)] == [4, 4, 4]
    assert limit.observe(load(0.5, preemptions=6), 4) == 3


def test_a_limit_that_does_not_bind_is_not_raised() -> None:
    limit = GroupLimit(8)
    limit.observe(load(1.0, preemptions=1), 8)
    assert limit.observe(load(0.2, preemptions=1), 2) == 6
