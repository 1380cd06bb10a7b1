"""Weights of published folders have a place in the model, and are written under the names that they had."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from service.learn.learner import Learner
from service.learn.model.hf_checkpoint import HEAD, Names, check_weights
from service.learn.model.hf_config import read_config, text_config, unread_weights
from service.learn.model.policy_model import stored_shapes
from tests.families.small import shrunk
from tests.pure.learn.builders import CPU, settings

MULTIMODAL = ("qwen3_5", "qwen3_5_moe", "gemma3")


@pytest.mark.parametrize(
    "family",
    [*MULTIMODAL, "glm4_moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt_oss", "qwen3_next"))],
)
def test_the_names_of_a_published_folder_are_mapped_without_a_rest(family: str) -> None:
    """A model of the published size on the meta device, under the names that its own class writes."""
    published = AutoConfig.for_model(family)
    kind = AutoModelForImageTextToText if family in MULTIMODAL else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(published, dtype=torch.bfloat16)
    stored = {name: tuple(w.shape) for name, w in revert_weight_conversion(model, dict(model.state_dict())).items()}
    names, config = Names.of(stored), text_config(published)
    with torch.device("meta"):
        weights = {name: torch.empty(shape) for name, shape in stored_shapes(config).items()}
    ours = {name: tuple(weight.shape) for name, weight in names.split(weights).items()}
    rest = {name for name in stored.keys() - ours.keys() if not names.is_other(name)}
    assert rest <= {names.stored(HEAD)} if config.tie_word_embeddings else not rest
    assert ours == {name: stored[name] for name in ours}
    assert bool(stored.keys() - ours.keys() - rest) == (family in MULTIMODAL)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_a_multimodal_folder_is_written_whole_and_loads_where_the_original_did(tmp_path: Path, family: str) -> None:
    published = AutoConfig.for_model(family)
    text, vision = shrunk(text_config(published)).to_dict(), {"hidden_size": 32, "intermediate_size": 32}
    vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        type(published)(text_config=text, vision_config=vision), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "model")
    file = "model.safetensors"
    if family != "gemma3":  # published folders have weights for predicting several tokens, which no class reads
        save_file(load_file(tmp_path / "model" / file) | {"mtp.norm.weight": torch.ones(3)}, tmp_path / "model" / file)
    config = read_config(tmp_path / "model")
    check_weights(tmp_path / "model", stored_shapes(config), unread_weights(config))
    learner = Learner(settings(), tmp_path / "model", CPU, 0, 1)
    learner.policy.export(tmp_path / "out")
    ours, theirs = (load_file(tmp_path / folder / file) for folder in ("out", "model"))
    assert ours.keys() | {"lm_head.weight", "language_model.lm_head.weight"} >= theirs.keys() >= ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    _, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
