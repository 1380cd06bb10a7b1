"""Runs on folders with what published models bring: each learns the quick start's task, as sampled and as published."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, GptOssForCausalLM, PreTrainedTokenizerFast

from actors.driver.prepare import prepare
from baton.examples.lookup import vocabulary
from service.config import load_config
from service.rollout.chat.tokenizer import ROLES
from tests.e2e.conftest import ROOT, Drive
from tests.e2e.test_quickstart import assert_engine_and_trainer_agree
from tests.families.engine import small_model

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1500)]

HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: medium # Valid channels: analysis, commentary, final.<|end|>' }}
{%- for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>
{{- m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt and m.role == 'assistant' else '<|end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def learned(drive: Drive, folder: Path, *settings: str) -> None:
    """Run the quick start with the model of a folder; it learns the task."""
    run = drive([*settings, "model.make=null", f"model.path={folder}", "weights.verify=true", "metrics.port=0"])
    run.finish()
    assert run.summary()["reward_gain"] >= 0.3
    assert_engine_and_trainer_agree(run, 100)


def test_a_pad_token_that_is_the_end_is_learned_as_an_end(drive: Drive, tmp_path: Path) -> None:
    folder = prepare(load_config([ROOT / "configs/quickstart.yaml"]), tmp_path).model_folder
    tokenizer, config = AutoTokenizer.from_pretrained(folder), folder / "config.json"
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": tokenizer.eos_token_id}))
    learned(drive, folder)


def test_a_model_of_gpt_oss_learns_with_its_template(drive: Drive, tmp_path: Path) -> None:
    names = ("return", "start", "message", "channel", "end", "call")
    specials = ["<|pad|>", "<|unk|>", *(f"<|{name}|>" for name in names)]
    words = [*specials, *ROLES, "Reasoning:", "medium", "final", *vocabulary()]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|return|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
    tokenizer.chat_template = HARMONY
    tokenizer.save_pretrained(tmp_path)
    config = small_model("gpt_oss").config
    config.update({"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": words.index("<|return|>")})
    config.update({"initializer_range": 0.02, "sliding_window": 64, "num_local_experts": 4})
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    # its head is not tied
    learned(drive, tmp_path, "model.warm_start.steps=1000", "model.warm_start.right_fraction=0.2")
