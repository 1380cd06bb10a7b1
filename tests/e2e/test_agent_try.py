"""`baton agent-try` with a model on vLLM: a call is answered, and a dead engine ends the trial."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import load_config
from tests.e2e.conftest import ROOT, Drive

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(400)]

SIZES = ["generator.max_input_length=512", "generator.max_generate_length=128", "model.dtype=float32"]


def test_a_trial_answers_calls_and_ends_at_once_where_its_engine_dies(drive: Drive, tmp_path: Path) -> None:
    model = prepare(load_config([ROOT / "configs/quickstart.yaml"]), tmp_path).model_folder
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
