"""A few kills at the worst moments; `make test-chaos` has hundreds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.theatre import Play, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 12


def test_kills_at_named_seams_leave_the_history_as_it_is_without_them(staged: Callable[[str], Play]) -> None:
    undisturbed = staged("calm").tell(settings(steps=STEPS)).start()
    dooms = {
        "buffer": [
            ("append.torn", 10),
            ("append.before_sync", 6),
            ("append.after_sync", 6),
            ("segment.torn_snapshot", 1),
            ("commit.after", 1),
            ("covered.before", 1),
        ],
        "trainer": [("commit.before", 2), ("manifest.half", 1), ("manifest.after", 1)],
    }
    play = staged("chaos").tell(settings(steps=STEPS), dooms).start()
    calm, report = undisturbed.ended(150), play.ended(240)
    assert report["history"] == calm["history"]
    # Where Ray takes a slow generator for dead, some of its work is done again: superseded, not trained twice.
    assert report["status"]["tokens"]["trained"] == calm["status"]["tokens"]["trained"]
    assert len(play.deaths("buffer")) == 6 and len(play.deaths("trainer")) == 3
