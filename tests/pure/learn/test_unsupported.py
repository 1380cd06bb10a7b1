"""Models whose packed forward pass would be wrong are refused where their folder is read, with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.errors import UserError
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.learner import Learner
from service.learn.model.hf_checkpoint import check_weights
from service.learn.model.hf_config import read_config
from service.learn.model.policy_model import trained_shapes
from tests.pure.learn.builders import CPU, made_rows, micro_batch, settings, small_model
from tests.pure.learn.families import FAMILIES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = YARN | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def described(folder: Path, family: str, **settings: Any) -> Path:
    """A folder with a config.json alone, as transformers writes it, with some settings changed."""
    FAMILIES[family].save_pretrained(folder)
    return changed(folder, **settings)


def changed(folder: Path, **settings: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


@pytest.mark.parametrize(("written", "needs"), [("5.0.0", ""), ("99.1.0.dev0", r" \(it needs 99\.1\.0\.dev0\)")])
def test_a_model_type_that_is_not_supported_is_named_and_the_version_that_it_needs(
    tmp_path: Path, written: str, needs: str
) -> None:
    folder = described(tmp_path, "qwen3", model_type="qwen4", transformers_version=written)
    known = r"model type 'qwen4' is none of the \d+ families .* the nearest is qwen\d; .* transformers 5\.\d+\.\d+"
    with pytest.raises(UserError, match=known + needs + "$"):
        read_config(folder)
    unread = r"describes no model: .*`qwen4`.*; transformers 5\.\d+\.\d+" + needs + r"; the nearest family is qwen\d$"
    with pytest.raises(UserError, match=unread):
        read_config(folder, proven=False)


def of_rope(**rope: Any) -> dict[str, Any]:
    return {"rope_parameters": None, "rope_scaling": rope, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"its weights are quantised \(quantization_config\)"),
        ({"layer_types": ["chunked_attention"] * 3}, "it has chunked_attention layers; supported are full_attention,"),
        ({"use_sliding_window": True, "sliding_window": -1}, "its sliding_window is -1"),
        ({"final_logit_softcapping": 30.0}, "sets final_logit_softcapping, which is not computed"),
        ({"output_router_logits": True}, "sets output_router_logits, which is not computed"),
        ({"hidden_act": "gelu"}, r"its activation is 'gelu' \(hidden_act\); engines compute silu only"),
        (of_rope(rope_type="dynamic", factor=2.0), "its RoPE is of type 'dynamic'; supported are default, linear,"),
        (of_rope(type="dynamic", factor=2.0), "its RoPE is of type 'dynamic'"),
        (of_rope(**LONGROPE), "its RoPE is of type 'longrope'"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(tmp_path: Path, setting: dict[str, Any], reason: str) -> None:
    read_config(described(tmp_path, "qwen3"))
    with pytest.raises(UserError, match=rf"cannot be trained: .*{reason}"):
        read_config(changed(tmp_path, **setting))


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN], ids=lambda rope: rope["rope_type"]
)
def test_position_embeddings_that_are_accepted_do_not_depend_on_the_other_rows(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    folder = changed(small_model(tmp_path / "model"), rope_parameters=rope | {"rope_theta": 1e4})
    model = Learner(settings(), folder, CPU, 0, 1).policy.model
    rows = [*made_rows(2, seed=90, lengths=(6, 9)), *made_rows(1, seed=91, lengths=(40, 41))]

    def logprob_M(*these: Any) -> torch.Tensor:
        return model(DeviceBatch.of(micro_batch(these), DeviceSettings(CPU, torch.float32)))[0].detach()

    torch.testing.assert_close(logprob_M(*rows), torch.cat([logprob_M(row) for row in rows]), atol=2e-5, rtol=0)


Weights = dict[str, torch.Tensor]
ATTENTION, UP = "model.layers.0.self_attn", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda w: w.update({f"{ATTENTION}.q_proj.bias": torch.ones(32)}),
            r"weight 'model\.layers\.0\.\S+bias'",
        ),
        (
            lambda w: w.update({name.replace("layers.1", "layers.2"): each.clone() for name, each in w.items()}),
            r"has a weight 'model\.layers\.2\.\S+', .* \(11 such weights\)",
        ),
        (
            lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
            r"lm_head\.weight in \S+ differs from model\.embed_tokens\.weight, but its config\.json ties",
        ),
        (lambda w: w.update({UP: w[UP].to(torch.float8_e4m3fn)}), r"up_proj\.weight in \S+ is of type F8_E4M3, which"),
        (lambda w: w.pop("model.norm.weight"), r"has no weight 'model\.norm\.weight', which its config\.json asks for"),
        (lambda w: w.update({"model.norm.weight": torch.ones(33)}), r"model\.norm\.weight"),
    ],
    ids=["bias", "third layer", "head", "eight bits", "no norm", "shape"],
)
def test_weights_that_config_json_does_not_describe_are_refused(
    tmp_path: Path, change: Callable[[Weights], object], reason: str
) -> None:
    folder = small_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"^model\.path: .*{reason}"):
        check_weights(folder, trained_shapes(read_config(folder)))
    with pytest.raises(UserError, match=reason):
        Learner(settings(), folder, CPU, 0, 1)


def test_a_weight_in_two_files_is_refused_because_engines_would_load_both(tmp_path: Path) -> None:
    folder, norm = small_model(tmp_path / "model"), "model.norm.weight"
    weights = load_file(folder / "model.safetensors")
    save_file({norm: torch.zeros(32)}, folder / "other.safetensors")
    names = dict.fromkeys(weights, "model.safetensors") | {norm: "other.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match=rf"model\.safetensors has '{norm}', which .* expects elsewhere; remove one"):
        check_weights(folder, trained_shapes(read_config(folder)))


def test_a_tied_head_that_is_stored_once_more_and_frequencies_of_old_folders_are_taken(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors")
    check_weights(folder, trained_shapes(read_config(folder)))
