"""The policy as the trainer sees it: a Hugging Face backbone that returns log-probabilities of packed rows.

Parameters keep their Hugging Face names (`model.layers.0...`, `lm_head.weight`); with tied embeddings there is no
`lm_head` at all, so nothing has to be untied, dropped or saved twice.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from service.config.learn import TrainerConfig
from service.config.model_folder import FAMILIES
from service.errors import UserError
from service.learn.device_batch import DeviceBatch
from service.learn.model import attention
from service.learn.model.experts import RouterReplay
from service.learn.model.logprob import token_logprobs

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Position embeddings that are the same for a token whatever row or micro-batch it lies in."""


class PolicyModel(nn.Module):
    """A causal language model over packed rows."""

    def __init__(self, backbone: nn.Module, lm_head: nn.Linear | None) -> None:
        super().__init__()
        self.model: Any = backbone
        self.lm_head = lm_head
        self._replay = RouterReplay(self.layers)

    def forward(self, placed: DeviceBatch) -> tuple[Tensor, Tensor]:
        """[M] log-probabilities of the tokens that carry loss, and entropies of the distributions they came from."""
        self._replay.set(placed.routed_experts())
        # a token is predicted at the position before it
        hidden_MD = self._hidden(placed, placed.loss_token_M - 1)
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        token_ids_M = placed.token_ids_N.index_select(0, placed.loss_token_M)
        return token_logprobs(hidden_MD, head.weight, token_ids_M, placed.of_row(placed.temperature_R))

    def _hidden(self, placed: DeviceBatch, token_M: Tensor) -> Tensor:
        if placed.padding is not None:
            lines = placed.padding
            hidden: Tensor = self.model(
                input_ids=lines.token_ids_RW,
                attention_mask=lines.attended_RW,
                position_ids=lines.position_ids_RW,
                use_cache=False,
            ).last_hidden_state
            at_M = lines.slot_N.index_select(0, token_M)
            return hidden.flatten(0, 1).index_select(0, at_M)
        hidden = self.model(
            input_ids=placed.token_ids_N[None],
            position_ids=placed.position_ids_N[None],
            use_cache=False,
            packing=placed.packing,
        ).last_hidden_state
        return hidden[0].index_select(0, token_M)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        layers: nn.ModuleList = self.model.layers
        return layers


def read_config(folder: Path) -> PretrainedConfig:
    """The model's configuration, refused where the packed forward pass would be wrong."""
    if not (folder / "config.json").is_file():
        raise UserError(f"model.path: {folder} has no config.json; point it at a Hugging Face model folder")
    refuse_remote_code(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, StrictDataclassError) as error:
        # What transformers raises depends on which of its assumptions about the file is broken.
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"model.path: {folder / 'config.json'} describes no model: {first}") from error
    reason = _unsupported(config)
    if reason:
        raise UserError(f"model.path: {folder} cannot be trained: {reason}")
    return config


def refuse_remote_code(folder: Path) -> None:
    """Raises `UserError` where a model folder names code of its own, which transformers or vLLM might then run."""
    for file in sorted(folder.glob("*config*.json")):
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            continue  # whoever needs the file says what is wrong with it
        if _has_key(settings, "auto_map"):
            raise UserError(f"model.path: {file} names code of its own (auto_map), which is not run; remove that entry")


def _has_key(value: object, key: str) -> bool:
    """Whether a mapping has the key, at any depth."""
    if isinstance(value, Mapping):
        return key in value or any(_has_key(inner, key) for inner in value.values())
    return isinstance(value, list) and any(_has_key(inner, key) for inner in value)


def _unsupported(config: PretrainedConfig) -> str | None:
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r} is not one of {', '.join(FAMILIES)}"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised (quantization_config); name the folder that it was quantised from"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention"}:
        return f"it has {', '.join(sorted(layer_types - {'full_attention'}))} layers; only full attention is supported"
    # not every family has layer types, and an engine reads the window by itself
    if getattr(config, "sliding_window", None):
        return (
            f"it attends in a sliding window (sliding_window {config.sliding_window}); only full attention is supported"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        # dynamic and longrope pick frequencies by the longest row of a forward pass
        return f"its RoPE is of type {rope_type!r}; supported are {', '.join(ROPE_TYPES)}"
    return None


def empty_model(config: PretrainedConfig, dtype: torch.dtype, trainer: TrainerConfig) -> PolicyModel:
    """The model without memory for its parameters (meta device)."""
    implementation = attention.NAME if trainer.layout == "packed" else "sdpa"
    if dtype == torch.float64 and hasattr(config, "num_experts"):
        config._experts_implementation = "eager"  # the default, grouped products, knows no float64
    # the engine samples without dropout, and ratios compare with what it sampled
    config.attention_dropout = 0.0
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    if trainer.fused_kernels:
        _fuse(whole)
    if trainer.compile:
        for layer in whole.model.layers:
            layer.compile(dynamic=True)
    if trainer.gradient_checkpointing:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
    model = PolicyModel(whole.model, None if config.tie_word_embeddings else whole.lm_head)
    model.train()
    return model


def weight_shapes(config: PretrainedConfig) -> dict[str, torch.Size]:
    """The shape of each weight of the model, by name; takes no memory."""
    model = empty_model(config, torch.float32, TrainerConfig())
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _fuse(whole: PreTrainedModel) -> None:
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise UserError(
            f"trainer.fused_kernels: liger-kernel cannot be imported ({error}); install it, or set false"
        ) from error
    liger._apply_liger_kernel_to_instance(whole, fused_linear_cross_entropy=False, cross_entropy=False)


def allocate(model: PolicyModel, config: PretrainedConfig, device: torch.device, on_cpu: bool = False) -> None:
    """Give an empty model memory; parameters hold garbage until they are loaded."""
    rotary = type(model.model.rotary_emb)
    model.to_empty(device="cpu" if on_cpu else device)
    # its buffers are computed, not loaded
    model.model.rotary_emb = rotary(config=config).to(device)
