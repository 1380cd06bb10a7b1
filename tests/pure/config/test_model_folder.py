"""A model folder that cannot be trained is refused by its files' headers, without loading torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.config import GeneratorConfig, check_paths, load_config
from service.errors import UserError
from service.model_folder import values_left_aside
from tests.pure.rollout.conftest import leave_ids_out

QUICKSTART = "configs/quickstart.yaml"


def check(model: Path, *settings: str) -> None:
    check_paths(load_config([QUICKSTART], ["model.make=null", f"model.path={model}", *settings]))


def test_a_whole_model_passes_also_in_parts(model: Path) -> None:
    check(model)
    split(model)
    check(model)


def test_the_values_of_a_generation_config_that_the_run_leaves_aside_are_named(tmp_path: Path) -> None:
    assert values_left_aside(tmp_path, GeneratorConfig()) is None
    file = {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.0,
        "eos_token_id": 3,
        "min_p": None,
        "do_sample": False,
        "suppress_tokens": [1],
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    said = values_left_aside(tmp_path, GeneratorConfig(top_k=20))
    assert said is not None and said.endswith(": do_sample=False, suppress_tokens=[1], top_p=0.95")
    assert values_left_aside(tmp_path, GeneratorConfig(temperature=0.6)).count("temperature=1.0") == 1  # type: ignore[union-attr]


def split(model: Path, **weight_map: str) -> None:
    """The weights as one of several files, with an index."""
    (model / "model.safetensors").rename(model / "part.safetensors")
    names = {"model.norm.weight": "part.safetensors", **weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def changed(**settings: Any) -> Callable[[Path], None]:
    """Settings of config.json; None: without that one."""

    def change(model: Path) -> None:
        shape = {**json.loads((model / "config.json").read_text()), **settings}
        (model / "config.json").write_text(
            json.dumps({key: value for key, value in shape.items() if value is not None})
        )

    return change


def written(file: str, text: str) -> Callable[[Path], Any]:
    return lambda model: (model / file).write_text(text)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda model: (model / "config.json").unlink(), r"has no config\.json"),
        (lambda model: (model / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (lambda model: (model / "model.safetensors").unlink(), r"has neither model\.safetensors nor"),
        (written("config.json", "{"), r"config\.json is no JSON"),
        (written("config.json", '{"rms_norm_eps": NaN}'), r"config\.json is no JSON: NaN is no number"),
        (written("config.json", "[]"), r"config\.json holds no object"),
        (written("config.json", "{}"), r"model type None is none of the"),
        (changed(model_type="mamba"), r"model type 'mamba' is none of the"),
        (changed(vocab_size=None), r"vocab_size is None"),
        (changed(vocab_size=10), r"the tokenizer in .* has \d+ tokens, its model only 10"),
        (lambda model: leave_ids_out(model, 500), r"the tokenizer in .* has \d+ tokens, its model only \d+"),
        (changed(quantization_config={"quant_method": "fp8"}), r"its weights are quantised"),
        (written("tokenizer.json", ""), r"no tokenizer can be read from .*tokenizer\.json"),
        (lambda model: split(model, other="part-2.safetensors"), r"has no part-2\.safetensors"),
        (written("model.safetensors.index.json", "{}"), r"is no index of weights"),
    ],
)
def test_a_damaged_model_is_one_line(damage: Callable[[Path], Any], told: str, model: Path) -> None:
    damage(model)
    with pytest.raises(UserError, match=rf"^model\.path: .*{told}") as caught:
        check(model)
    assert "\n" not in str(caught.value)


def test_turns_may_be_as_long_as_an_engine_lets_the_model_reach(model: Path) -> None:
    lengths = ["generator.max_input_length=96", "generator.max_generate_length=32"]
    changed(max_position_embeddings=128)(model)
    check(model, *lengths)
    changed(max_position_embeddings=127)(model)
    with pytest.raises(UserError, match=r"^generator\.max_input_length: .* comes to 128 tokens, .* reaches only 127"):
        check(model, *lengths)
    changed(rope_parameters={"rope_type": "yarn", "factor": 4.0})(model)
    with pytest.raises(UserError, match="reaches only 127"):
        check(model, *lengths)
    changed(max_position_embeddings=64, rope_parameters={"rope_type": "linear", "factor": 2.0})(model)
    check(model, *lengths)
    changed(rope_parameters={"rope_type": "linear", "factor": 1.9})(model)
    with pytest.raises(UserError, match=r"reaches only 121\.6"):
        check(model, *lengths)
    changed(max_position_embeddings=0)(model)
    with pytest.raises(UserError, match=r"max_position_embeddings in its config\.json is 0"):
        check(model, *lengths)


def test_ranks_that_cannot_divide_the_heads_of_a_model_are_one_line(model: Path) -> None:
    changed(num_attention_heads=8, num_key_value_heads=4)(model)
    check(model, "trainer.ranks=8", "trainer.sequence_parallel=8")
    changed(num_attention_heads=12, num_key_value_heads=4)(model)
    with pytest.raises(
        UserError, match=r"^trainer\.sequence_parallel: 6 ranks cannot divide .* 12 heads and 4 key heads"
    ):
        check(model, "trainer.ranks=6", "trainer.sequence_parallel=6")
