"""`baton sft` as a user runs it, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from actors.driver.prepare import prepare
from service.cli.parser import main
from service.config import load_config
from service.config.rollout import GeneratorConfig
from service.rollout.chat.chat import load_chat
from service.rollout.prompts.conversations import conversation_rows
from service.run.folder import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ANIMALS = ("fox", "owl", "cat", "dog")


def command(folder: Path, *settings: str) -> list[str]:
    """The command with a small model and two files of conversations, which it makes."""
    model = prepare(load_config([ROOT / "configs/quickstart.yaml"]), folder).model_folder
    row = '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "look {} age"}}]}}\n'
    for name, number in (("rows", 32), ("held", 8)):
        texts = [ANIMALS[i % len(ANIMALS)] for i in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(row.format(text, text) for text in texts))
    own = (f"model.path={model}", f"data.train={folder}/rows.jsonl", f"data.eval.held={folder}/held.jsonl")
    words = ("sft", f"run.dir={folder}", *own, "trainer.mini_batch_size=8")
    return [
        sys.executable,
        "-m",
        "service",
        *words,
        "model.dtype=float32",
        "trainer.warmup_steps=2",
        "trainer.lr=3e-3",
        *settings,
    ]


def test_conversations_are_learned_and_the_final_model_is_one_for_transformers_and_for_rl(tmp_path: Path) -> None:
    words = command(tmp_path, "run.max_steps=12", "data.eval_every=6", "trainer.checkpoint_every=4")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 steps of 8 out of 32 conversations: 3.00 epochs" in done.stdout
    assert [line.endswith(" s left") for line in done.stdout.splitlines() if line.startswith("step ")] == [
        *[True] * 11,
        False,
    ]
    run = tmp_path / "sft"
    lines = list(read_lines(run / "metrics.jsonl"))
    assert [line["trainer/global_step"] for line in lines] == [*range(1, 13)]
    assert lines[-1]["eval/held/loss"] < 0.7 * lines[5]["eval/held/loss"]
    assert sorted(each.name for each in (run / "checkpoints").iterdir()) == ["step_4", "step_8"]

    (chat, held) = load_chat(run / "final", GeneratorConfig()), tmp_path / "held.jsonl"
    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    losses = []
    for row in conversation_rows(held, chat, "append", 100):
        ids, mask = torch.as_tensor(row.token_ids, dtype=torch.int64), torch.as_tensor(row.loss_mask[1:])
        losses.append(cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask])
    assert lines[-1]["eval/held/loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)
    summary = json.loads((run / "summary.json").read_text())
    assert summary == {"state": "finished", "steps": 12, "eval/held/loss": lines[-1]["eval/held/loss"]}
    taken = ["model.make=null", "model.warm_start=null", f"model.path={run / 'final'}"]
    assert main(["config", "validate", "--config", "configs/quickstart.yaml", *taken]) == 0
    assert prepare(load_config([ROOT / "configs/quickstart.yaml"], taken), tmp_path / "rl").base == run / "final"


@pytest.mark.full
def test_a_stop_signal_to_its_process_group_ends_it_after_its_step_with_the_final_model(tmp_path: Path) -> None:
    words = command(tmp_path, "run.max_steps=100000", "trainer.checkpoint_every=0")
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as training:
        try:
            said, metrics = "", tmp_path / "sft/metrics.jsonl"
            assert training.stdout is not None
            while not metrics.exists():
                said += (line := training.stdout.readline())
                assert line, said
                if "after step 0" in line:
                    break
            while not metrics.exists():
                assert training.poll() is None, said
            os.killpg(training.pid, signal.SIGTERM)  # as `timeout` does
            said += training.stdout.read()
            assert training.wait(60) == 128 + signal.SIGTERM, said
        finally:
            training.kill()
    steps = json.loads((tmp_path / "sft/summary.json").read_text())["steps"]
    assert f"stopped after {steps} steps" in said and steps == len(metrics.read_text().splitlines())
    assert (tmp_path / "sft/final/config.json").is_file() and os.path.getsize(metrics)
