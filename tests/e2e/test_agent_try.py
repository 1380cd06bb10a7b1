"""`baton agent-try` with a model on vLLM: a call is answered, and a dead engine ends the trial."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from service.rollout.chat.tokenizer import load_tokenizer, make_byte_tokenizer
from tests.e2e.conftest import Drive
from tests.e2e.test_engine import SHAPE

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(400)]

SIZES = ["generator.max_input_length=512", "generator.max_generate_length=128", "model.dtype=float32"]


def make_model(folder: Path) -> None:
    """A small model of random weights, whose tokens are bytes."""
    make_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(folder)


def test_a_trial_answers_calls_and_ends_at_once_where_its_engine_dies(drive: Drive, tmp_path: Path) -> None:
    make_model(tmp_path)
    trial = drive([str(tmp_path), *SIZES], command="agent-try")
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
