"""`baton sft` as a user runs it, and what it leaves."""

import json
import os
import signal
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
from tests.e2e.conftest import ROOT, Drive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ANIMALS = ("fox", "owl", "cat", "dog")
LEARNS = ["trainer.mini_batch_size=8", "model.dtype=float32", "trainer.warmup_steps=2", "trainer.lr=3e-3"]


def settings_of(folder: Path, *settings: str) -> list[str]:
    """The settings of a small model and two files of conversations, which it makes."""
    model = prepare(load_config([ROOT / "configs/quickstart.yaml"]), folder).model_folder
    row = '{{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "look {} age"}}]}}\n'
    for name, number in (("rows", 32), ("held", 8)):
        texts = [ANIMALS[i % len(ANIMALS)] for i in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(row.format(text, text) for text in texts))
    own = (f"model.path={model}", f"data.train={folder}/rows.jsonl", f"data.eval.held={folder}/held.jsonl")
    return [*own, f"run.dir={folder}", *LEARNS, *settings]


def test_conversations_are_learned_and_the_final_model_is_one_for_transformers_and_for_rl(
    drive: Drive, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, "run.max_steps=12", "data.eval_every=6", "trainer.checkpoint_every=4")
    done, run = drive(settings, command="sft"), tmp_path / "sft"
    done.finish()
    assert any("12 optimizer steps of 8 conversations; the data has 32: 3.00 epochs" in line for line in done.said)
    steps = [line.strip().endswith(" s left") for line in done.said if line.startswith("step ")]
    assert steps == [*[True] * 11, False]
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
def test_a_stop_signal_to_its_process_group_ends_it_after_its_step_with_the_final_model(
    drive: Drive, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path, "run.max_steps=100000", "trainer.checkpoint_every=0")
    training, metrics = drive(settings, command="sft"), tmp_path / "sft/metrics.jsonl"
    training.until_true(metrics.exists)
    os.killpg(training.process.pid, signal.SIGTERM)  # as `timeout` does
    assert training.end() == 128 + signal.SIGTERM, training.tail()
    steps = json.loads((tmp_path / "sft/summary.json").read_text())["steps"]
    assert f"stopped after {steps} steps" in training.tail() and steps == len(metrics.read_text().splitlines())
    assert (tmp_path / "sft/final/config.json").is_file()
