"""`baton eval` as a user stops it."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import load_config
from tests.e2e.conftest import MARK, ROOT, Drive, LeftOver
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

QUICKSTART = "configs/quickstart.yaml"
END_SECONDS = 60


@pytest.mark.parametrize(("number", "word"), [(signal.SIGTERM, "starting Ray"), (signal.SIGINT, "evaluating")])
def test_a_stopped_evaluation_ends_with_its_signals_code_and_leaves_nothing(
    number: signal.Signals, word: str, drive: Drive, left_over: LeftOver, tmp_path: Path
) -> None:
    model, output = prepare(load_config([ROOT / QUICKSTART]), tmp_path).model_folder, tmp_path / "result.json"
    words = [str(model), "--config", QUICKSTART, "--output", str(output)]
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:  # short: Ray puts sockets into it
        many = ["data.eval_make_rows=4096", "data.eval_samples=100"]
        evaluation = drive([*words, *many], command="eval", TMPDIR=temporary)
        evaluation.until(word)
        before = len(evaluation.said)
        evaluation.stop(number)
        *while_it_ended, last = evaluation.said[before:]
        assert last.strip().endswith(f"stopped by {number.name}: there is no result"), evaluation.tail()
        assert all(line.startswith(word) for line in while_it_ended), evaluation.tail()
        assert left_over(MARK, evaluation.mark, END_SECONDS) == {}
        until(lambda: not os.listdir(temporary), said=lambda: os.listdir(temporary))
    assert not output.exists()
