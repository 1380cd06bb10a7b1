"""`baton agent-try`: an agent's author sees each call, its role, and what would be trained."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.driver.commands import trial_config
from service.cli import main
from tests.pure.agents.endpoint import CHAT, MESSAGES
from tests.pure.agents.talks import called

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.slow
async def test_an_agent_is_tried_with_a_script_(tmp_path: Path) -> None:
    script = tmp_path / "replies.txt"
    script.write_text("\n".join((called().replace("\n", " "), "Fox ages", "it is 17")))
    command = [sys.executable, "-m", "service", "agent-try", "--scripted", str(script)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    printed = ""
    try:
        async with asyncio.timeout(120):
            while (found := re.search(r"ANTHROPIC_BASE_URL=(\S+) ANTHROPIC_API_KEY=(\S+)", printed)) is None:
                printed += (line := await process.stdout.readline()).decode()
                assert line, printed
            url, key = found.groups()
            assert f"OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}" in printed
            asked: list[Any] = [{"role": "user", "content": "age of marn?"}]
            async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
                async with http.post(url + CHAT, json={"messages": asked, "tools": [TOOL], "seed": 5}) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                body = {"messages": [{"role": "user", "content": "a title?"}], "max_tokens": 50}
                async with http.post(url + MESSAGES, json=body) as answer:
                    assert (await answer.json())["content"] == [{"type": "text", "text": "Fox ages"}]
                asked += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": key}]
                async with http.post(url + CHAT, json={"messages": asked, "tools": [TOOL], "stream": True}) as answer:
                    assert "it is 17" in await answer.text()
                async with http.post(url + CHAT, json={"messages": asked, "logit_bias": {"5": 1}}) as answer:
                    assert answer.status == 400
                finish = url.replace("/s/", "/rl/sessions/") + "/finish"
                async with http.post(finish, json={"reward": 1.0}) as answer:
                    assert answer.status == 200
                printed += (await process.stdout.read()).decode()  # the client keeps its connection
            assert await process.wait() == 0 and "Traceback" not in printed, printed
    finally:
        if process.returncode is None:
            process.kill()
    assert not re.search(r"\| +(torch|ray|vllm)$", printed, re.MULTILINE), "a script needs none of them"
    shown, at_the_end = printed.split("at the end:")
    assert re.search(
        r'call 0: main, a new conversation, \d+ tokens -> \d+ sampled, calls search\({"query": "marn"}\)', shown
    )
    assert "call 1: main, a new conversation" in shown, "so far it is the newest call"
    assert "call 1: aux, a new conversation" in at_the_end and "call 2: main, continues 0" in at_the_end
    sampled = [int(n) for n in re.findall(r"-> (\d+) sampled", at_the_end)]
    assert f"{sampled[0] + sampled[2]} of {sum(sampled)} sampled tokens would be trained" in at_the_end
    assert "fields that do not reach the policy: seed" in shown
    assert "refused 1 times: 400 logit_bias" in at_the_end


def test_a_trial_without_a_policy_or_a_folder_of_one_is_refused_in_one_line_before_vllm_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "actors.driver.try_agent", None)  # what loads vLLM
    (empty := tmp_path / "empty.txt").touch()
    for words in ([], ["--scripted", str(empty)], ["models/m", "--scripted", str(empty)]):
        assert main(["agent-try", *words]) == 2
        assert "--scripted FILE" in capsys.readouterr().err
    (tmp_path / "replies.txt").write_text("17")
    for words in ([], ["--scripted", str(tmp_path / "replies.txt")]):
        for folder in (tmp_path / "none", tmp_path):
            assert main(["agent-try", str(folder), *words]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert str(folder) in line


@pytest.mark.parametrize(
    ("window", "overrides", "longest"),
    [
        (8192, [], 8192 - 2048),
        (8192, ["generator.max_generate_length=512"], 8192 - 512),
        (8192, ["generator.max_input_length=300"], 300),
        (1 << 20, [], 16384),
        (100, [], 1),
    ],
)
def test_without_a_configuration_prompts_are_as_long_as_the_window_of_the_model_allows(
    tmp_path: Path, window: int, overrides: list[str], longest: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": window}))
    assert trial_config([], overrides, tmp_path).generator.max_input_length == longest
    (file := tmp_path / "mine.yaml").write_text("generator: {max_input_length: 9999}\nenv: {name: lookup}")
    assert trial_config([file], [], tmp_path).generator.max_input_length == 9999, "a configuration is taken as it is"
