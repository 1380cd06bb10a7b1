"""`baton eval` as a user stops it, and `baton agent-try` with a model on vLLM."""

import json
import os
import re
import signal
import tempfile
import urllib.request
from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import load_config
from tests.e2e.conftest import MARK, ROOT, Drive, LeftOver
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

QUICKSTART = "configs/quickstart.yaml"
END_SECONDS = 60
SIZES = ["generator.max_input_length=512", "generator.max_generate_length=128", "model.dtype=float32"]


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


def test_a_trial_answers_calls_and_ends_at_once_where_its_engine_dies(drive: Drive, tmp_path: Path) -> None:
    model = prepare(load_config([ROOT / QUICKSTART]), tmp_path).model_folder
    trial = drive([str(model), *SIZES], command="agent-try")
    told = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)\n", trial.until("OPENAI_BASE_URL="))
    assert told is not None
    body = {"messages": [{"role": "user", "content": "age?"}], "max_tokens": 5}
    headers = {"Authorization": f"Bearer {told[2]}", "Content-Type": "application/json"}
    call = urllib.request.Request(f"{told[1]}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=120) as answer:
        assert answer.status == 200
    trial.kill_part("EngineCore")
    assert trial.end() == 1
    assert trial.said[-1].strip() == "baton: the engine core died; its log says why"
