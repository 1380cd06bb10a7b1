"""What others record in front of the endpoint equals the steps: tokens, masks and log-probabilities."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from actors.engine.run_player import RunPlayer
from service.config import Config
from service.config.rollout import AGENT, EnvConfig, GeneratorConfig
from service.handoff.steps.tables import step_objects
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.engine import Generation
from service.rollout.prompts.dataset import load_tasks
from service.rollout.step_sinks import StepColumns
from service.types import Step, TrajectoryId
from tests.pure.agents.own_environment import IN_TIME, RUN_SECONDS, python_with
from tests.pure.rollout.conftest import ScriptedEngine, generated
from tests.pure.rollout.test_agent import optimal
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON

VERIFIERS = "verifiers==0.4.0"
ROOT = Path(__file__).parents[3]
PROGRAM, SUMS = ROOT / "baton" / "examples" / "verifiers_agent.py", "verifiers_sums"

pytestmark = [pytest.mark.full, pytest.mark.slow, IN_TIME]


async def test_a_taskset_of_verifiers_runs_as_a_command(tmp_path: Path) -> None:
    """Rows, command and score as the documentation has them; the trace of each rollout equals its trajectory."""
    python, model, traces = python_with(VERIFIERS), tmp_path / "model", tmp_path / "traces"
    traces.mkdir()
    like_qwen3().save_pretrained(model)
    made = subprocess.run([python, PROGRAM, "rows", SUMS], stdout=subprocess.PIPE, check=True)
    (tmp_path / "train.jsonl").write_bytes(made.stdout)
    tasks = {task.prompt[0]["content"]: task for task in load_tasks(tmp_path / "train.jsonl")}
    assert len(tasks) == 100
    command = (str(python), str(PROGRAM), "play", SUMS, str(model), "qwen3")
    score = ("sh", "-c", f"cp trace.json $(mktemp -p {traces}) && cat reward")
    asked = ("3 + 4 ?", "3 + 5 ?", "5 + 4 ?")
    config = Config(
        env=EnvConfig(name=AGENT, command=command, score=score),
        generator=GeneratorConfig(max_input_length=1000, max_generate_length=100),
    )
    engine, sink = ScriptedEngine(Chat(load_tokenizer(model)), optimal), StepColumns()
    engine.script = lambda words: thought(engine.chat, " ".join(words))
    player = RunPlayer(config, model, engine)
    async with AsyncExitStack() as held, asyncio.timeout(RUN_SECONDS):
        held.push_async_callback(player.close)
        playing = [player.play(TrajectoryId(row, 0), tasks[one], sink) for row, one in enumerate(asked)]
        ends = await asyncio.gather(*playing)
    assert [(end.reward, end.n_steps) for end in ends] == [(1.25, 2), (1.0, 2), (0.25, 2)], ends
    steps = list(step_objects(sink.steps()))
    rows = [row_of([step for step in steps if step.trajectory == end.trajectory]) for end in ends]
    kept = [json.loads(file.read_text()) for file in traces.iterdir()]
    of_prompt = {trace["task"]["data"]["prompt"]: trace["nodes"] for trace in kept}
    for one, row in zip(asked, rows, strict=True):
        nodes = of_prompt[one]
        assert [node["parent"] for node in nodes] == [None, 0, 1, 2]
        assert row["token_ids"] == [token for node in nodes for token in node["token_ids"]]
        assert row["mask"] == [of_policy for node in nodes for of_policy in node["mask"]]
        sampled = [one for one, of_policy in zip(row["logprobs"], row["mask"], strict=True) if of_policy]
        traced = [one for node in nodes for one in node["logprobs"]]
        assert traced == [round(one, 4) for one in sampled]  # as verifiers writes a trace


def thought(chat: Chat, prompt: str) -> Generation:
    """Thinks and answers a sum: wrong at first where 5 is added, wrong at last where 5 is the first number."""
    ((a, b),) = re.findall(r"(\d) \+ (\d) \?", prompt)
    is_wrong = a == "5" if "sure" in prompt else b == "5"
    text = f"<think>\nwell\n</think>\n\n{0 if is_wrong else int(a) + int(b)}"
    ids = [*chat._special_tokens.encode(text).tolist(), chat.end_id]
    return replace(generated(ids), logprobs=-np.linspace(0.5, 1.5, len(ids), dtype=np.float32))


def row_of(steps: Sequence[Step]) -> dict[str, list[Any]]:
    """The row of a chain of steps: what a prompt adds, then what was sampled."""
    row: dict[str, list[Any]] = {"token_ids": [], "mask": [], "logprobs": []}
    for step in steps:
        n = len(step.prompt_ids)
        row["token_ids"] += [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
        row["mask"] += [False] * n + step.loss_mask.tolist()
        row["logprobs"] += [0.0] * n + [float(one) for one in step.logprobs]  # type: ignore[union-attr]
    return row


def like_qwen3() -> PreTrainedTokenizerBase:
    """Bytes, and the marks of the family Qwen3."""
    made = Tokenizer(models.BPE({one: i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=THINKING_AND_JSON,
        clean_up_tokenization_spaces=False,
    )
