"""A Ray that does not start."""

import tempfile
from pathlib import Path

import pytest

from actors.driver import cluster
from actors.driver.watchdog import MARK
from service.config import Config
from service.errors import RunFailed

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(Exception(SLOW), RunFailed), (ConnectionError("refused"), RunFailed), (TypeError("a bug"), TypeError)],
)
def test_a_ray_that_does_not_start_ends_the_run_with_a_reason_and_a_bug_stays_one(
    failure: Exception, raised: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**settings: object) -> None:
        raise failure

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(MARK, "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cluster, "start_watchdog", lambda *words: None)
    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(raised, match=str(failure)), cluster.ray_session(Config(), "mark", tmp_path):
        raise AssertionError("there is no Ray")
