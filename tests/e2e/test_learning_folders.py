"""Runs on folders with what published models bring: each learns the quick start's task, as sampled and as published."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssForCausalLM, PreTrainedTokenizerFast

from actors.driver.prepare import prepare
from baton.examples.lookup import vocabulary
from service.config import load_config
from service.rollout.chat.tokenizer import ROLES, make_tokenizer, words_of
from service.run.folder import TRAJECTORIES, read_lines
from tests.e2e.conftest import ROOT, Drive, Driver
from tests.e2e.test_quickstart import assert_engine_and_trainer_agree
from tests.families.engine import of_kind, small_model

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1500)]

PADDING = 300
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: medium # Valid channels: analysis, commentary, final.<|end|>' }}
{%- for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>
{{- m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt and m.role == 'assistant' else '<|end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""


def learned(drive: Drive, folder: Path, *settings: str) -> Driver:
    """A run of the quick start with the model of a folder, which learns the task."""
    run = drive([*settings, "model.make=null", f"model.path={folder}", "weights.verify=true", "metrics.port=0"])
    run.finish()
    assert run.summary()["reward_gain"] >= 0.3
    assert_engine_and_trainer_agree(run, 100)
    return run


def test_rows_of_the_head_beyond_the_tokenizer_are_trained_as_they_are_sampled(drive: Drive) -> None:
    warm = drive(["run.max_steps=1", "run.name=warm", "metrics.port=0"])
    warm.finish()
    folder = warm.folder / "final"
    model, words = AutoModelForCausalLM.from_pretrained(folder), len(AutoTokenizer.from_pretrained(folder))
    # words that the policy knows, a little less likely: a fifth of what it samples at first is padding
    head = model.resize_token_embeddings(words + PADDING, mean_resizing=False).weight
    with torch.no_grad():
        head[words:] = 0.6 * head[torch.arange(PADDING) % words]
    model.save_pretrained(folder)
    run = learned(drive, folder, "model.warm_start=null")
    records = list(read_lines(run.folder / TRAJECTORIES))

    def share(of: range) -> float:
        """The part of the tokens that are padding and carry loss."""
        steps = [step for one in records if one["optimizer_step"] in of for step in one["steps"]]
        pairs = [pair for step in steps for pair in zip(step["response_ids"], step["loss_mask"], strict=True)]
        padding: int = sum(token >= words and trained for token, trained in pairs)
        return padding / len(pairs)

    first, last = share(range(1, 11)), share(range(91, 101))
    print(f"trained padding: {first:.3f} at first, {last:.3f} at last")
    assert first > 0.1 and last < first / 2


def test_a_pad_token_that_is_the_end_is_learned_as_an_end(drive: Drive, tmp_path: Path) -> None:
    folder = prepare(load_config([ROOT / "configs/quickstart.yaml"]), tmp_path).model_folder
    tokenizer, config = AutoTokenizer.from_pretrained(folder), folder / "config.json"
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": tokenizer.eos_token_id}))
    learned(drive, folder)


def test_an_adapter_on_the_language_model_of_a_multimodal_folder_learns(drive: Drive, tmp_path: Path) -> None:
    config = small_model("gemma3", 0, multimodal=True).config
    words = words_of(vocabulary())
    layers = ["sliding_attention", "full_attention"]
    config.text_config.update({"layer_types": layers, "num_hidden_layers": 2, "sliding_window": 64})
    config.text_config.update({"vocab_size": len(words), "initializer_range": 0.02})
    of_kind(config).from_config(config).save_pretrained(tmp_path)
    make_tokenizer(tmp_path, vocabulary())
    learned(drive, tmp_path, "model.lora.rank=16", "trainer.lr=1e-3")


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
