"""`baton agent-try` with a model on vLLM: a prescribed form is enforced, and a dead engine ends the trial."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from service.rollout.chat.tokenizer import load_tokenizer, make_byte_tokenizer
from tests.e2e.test_engine import SHAPE

pytestmark = pytest.mark.slow


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
async def test_a_trial_whose_engine_dies_ends_at_once(tmp_path: Path) -> None:
    async with trial(tmp_path) as (process, log, _, _):
        (core,) = (child for child in psutil.Process(process.pid).children(recursive=True) if "Core" in child.name())
        os.kill(core.pid, signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), 60) == 1
        assert log.read_text().splitlines()[-1] == "baton: the engine core died; its log says why"


@pytest.mark.timeout(400)
async def test_a_prescribed_form_is_enforced_by_the_engine_and_one_that_it_does_not_know_is_refused(
    tmp_path: Path,
) -> None:
    pytest.importorskip("lmformatenforcer")
    async with trial(tmp_path, "agents.structured=constrain") as (process, log, url, key):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http:

            async def asked(**more: Any) -> tuple[int, Any]:
                body = {"messages": [{"role": "user", "content": "age?"}], **more}
                async with http.post(f"{url}/chat/completions", json=body) as answer:
                    return answer.status, await answer.json()

            schema = {"type": "object", "properties": {"age": {"enum": [17, 18]}}, "required": ["age"]}
            schema["additionalProperties"] = False
            form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            for _ in range(3):
                status, answer = await asked(response_format=form)
                assert status == 200
                said = answer["choices"][0]
                if said["finish_reason"] == "stop":
                    assert json.loads(said["message"]["content"])["age"] in (17, 18)
            function = {"name": "look", "parameters": {"type": "object", "properties": {}, "maxProperties": 0}}
            tools = [{"type": "function", "function": function}]
            status, answer = await asked(tools=tools, tool_choice="required")
            assert status == 200
            form["json_schema"]["schema"] = {"type": "no such type"}
            status, refused = await asked(response_format=form)
            assert status == 400 and "cannot enforce" in refused["error"]["message"]
            assert (await asked(max_tokens=5))[0] == 200, "the engine goes on"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
        assert re.search(r"\d+ of \d+ sampled tokens would be trained", log.read_text())
