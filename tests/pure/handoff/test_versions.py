import numpy as np
import pytest

from service.handoff.ledger.state import VersionHistory
from service.types import PolicyVersion


def packed(*versions: tuple[int, int]) -> np.ndarray:
    return np.array([PolicyVersion(*v).pack() for v in versions], np.int64)


def history() -> VersionHistory:
    made = VersionHistory()
    for step in (1, 2, 3):
        made.publish(PolicyVersion(0, step))
    return made


def test_after_a_rollback_an_abandoned_version_counts_the_steps_to_it_and_at_least_one() -> None:
    made = history()
    assert made.rollback(1) == 1
    assert made.current == PolicyVersion(1, 1)
    ages = made.staleness(packed((0, 0), (0, 1), (0, 2), (0, 3), (1, 1)), made.current)
    assert ages.tolist() == [1, 0, 1, 2, 0]
    made.publish(PolicyVersion(1, 2))
    ages = made.staleness(packed((0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (-1, -1)), made.current)
    assert ages.tolist() == [2, 1, 1, 1, 1, 0, -1]


def test_versions_of_two_abandoned_histories_count_alike() -> None:
    made = history()
    made.rollback(1)
    made.publish(PolicyVersion(1, 2))
    made.rollback(0)
    for number in (1, 2, 3, 4):
        made.publish(PolicyVersion(2, number))
    ages = made.staleness(packed((0, 0), (0, 1), (0, 3), (1, 1), (1, 2), (2, 3)), made.current)
    assert ages.tolist() == [4, 3, 1, 3, 2, 1]


def test_only_published_versions_are_known() -> None:
    made = history()
    made.rollback(1)
    known = made.known(packed((0, 0), (0, 3), (0, 4), (1, 1), (1, 2), (2, 0)))
    assert known.tolist() == [True, True, False, True, False, False]


def test_versions_only_go_forward() -> None:
    with pytest.raises(ValueError, match="does not follow"):
        history().publish(PolicyVersion(0, 3))
    with pytest.raises(ValueError, match="go back"):
        history().rollback(4)
