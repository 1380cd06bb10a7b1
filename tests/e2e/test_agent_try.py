"""`baton agent-try` with a model on vLLM: a call is answered, and a dead engine ends the trial."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from service.rollout.chat.tokenizer import load_tokenizer, make_byte_tokenizer
from tests.e2e.test_engine import SHAPE

pytestmark = [pytest.mark.slow, pytest.mark.full]


def make_model(folder: Path) -> None:
    """A small model of random weights, whose tokens are bytes."""
    make_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    shape = SHAPE | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(folder)


@asynccontextmanager
async def trial(folder: Path, *settings: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path, str, str]]:
    """A trial under way: its process, what it prints, and the base URL and the key of its session."""
    make_model(folder)
    sizes = ["generator.max_input_length=512", "generator.max_generate_length=128", "model.dtype=float32"]
    command = [sys.executable, "-m", "service", "agent-try", str(folder), *settings, *sizes]
    log = folder / "log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    try:
        async with asyncio.timeout(300):
            while (found := re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)\n", log.read_text())) is None:
                assert process.returncode is None
                await asyncio.sleep(0.2)
            yield process, log, *found.groups()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        print(log.read_text())


@pytest.mark.timeout(400)
async def test_a_trial_answers_calls_and_ends_at_once_where_its_engine_dies(tmp_path: Path) -> None:
    async with trial(tmp_path) as (process, log, url, key):
        body = {"messages": [{"role": "user", "content": "age?"}], "max_tokens": 5}
        async with aiohttp.ClientSession(url.removesuffix("v1"), headers={"x-api-key": key}) as http:
            answer = await http.post("v1/chat/completions", json=body)
            assert answer.status == 200
        (core,) = (child for child in psutil.Process(process.pid).children(recursive=True) if "Core" in child.name())
        os.kill(core.pid, signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), 60) == 1
        assert log.read_text().splitlines()[-1] == "baton: the engine core died; its log says why"
