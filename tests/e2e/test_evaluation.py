"""`baton eval` as a user stops it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import load_config
from tests.e2e.conftest import MARK, LeftOver
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
QUICKSTART = "configs/quickstart.yaml"
END_SECONDS = 60


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGTERM, "starting Ray"), (signal.SIGINT, "evaluating")],
)
def test_a_stopped_evaluation_ends_with_its_signals_code_and_leaves_nothing(
    number: signal.Signals, word: str, left_over: LeftOver, tmp_path: Path
) -> None:
    model = prepare(load_config([ROOT / QUICKSTART]), tmp_path).model_folder
    mark, output = secrets.token_hex(8), tmp_path / "result.json"
    command = [sys.executable, "-m", "service", "eval", str(model), "--config", QUICKSTART, "--output", str(output)]
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:  # short: Ray puts sockets into it
        with subprocess.Popen(
            [*command, "data.eval_make_rows=4096", "data.eval_samples=100"],
            cwd=ROOT,
            env={**os.environ, MARK: mark, "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as evaluation:
            try:
                assert evaluation.stdout is not None
                said = ""
                while word not in said:
                    line = evaluation.stdout.readline()
                    assert line, said
                    said += line
                evaluation.send_signal(number)
                rest = evaluation.stdout.read()
                assert evaluation.wait(END_SECONDS) == 128 + number, said + rest
                *while_it_ended, last = rest.splitlines()
                assert last.endswith(f"stopped by {number.name}: there is no result"), rest
                assert all(line.startswith(word) for line in while_it_ended), rest
            finally:
                evaluation.kill()
        assert left_over(MARK, mark, END_SECONDS) == {}
        until(lambda: not os.listdir(temporary), said=lambda: os.listdir(temporary))
    assert not output.exists()
