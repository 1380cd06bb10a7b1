"""The policy's model: a Hugging Face backbone with a head that returns log-probabilities instead of logits.

Parameters keep their Hugging Face names (`model.layers.0...`, `lm_head.weight`). With tied embeddings the model has no
`lm_head`, so the shared weight exists once, in memory and in saved files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from service.config.learn import LoraConfig, TrainerConfig
from service.errors import UserError
from service.learn.compile import compile_layers
from service.learn.device_batch import DeviceBatch, Support
from service.learn.model import attention
from service.learn.model.delta_net import use_packed_rows
from service.learn.model.hf_config import logit_scale
from service.learn.model.logprob import TokenLogprobs, token_logprobs
from service.learn.model.lora import add_adapter
from service.learn.model.router_replay import RouterReplay

DROPOUT = ("dropout", "pdrop")
"""Endings of the names of a model's settings that are dropout probabilities."""


class Checkpointing(NamedTuple):
    """The level of gradient checkpointing: which values are computed or gathered again in the backward pass instead of
    being kept in memory."""

    layers: int
    """Number of layers that keep only their input and compute all else again."""
    elementwise: bool = False
    """Whether the other layers, if they are compiled, compute the results of elementwise operations again."""
    regather: bool = True
    """Whether the gathered weights of layers are freed after the forward pass and gathered again for the backward
    pass."""

    @staticmethod
    def of(trainer: TrainerConfig, n_layers: int) -> Checkpointing:
        """The level that the trainer's settings give. The values `auto` stand for the level of the first trial: no
        layer is checkpointed, and weights are freed and gathered again."""
        setting = trainer.gradient_checkpointing
        every = 0 if isinstance(setting, str) else int(setting)
        return Checkpointing(-(-n_layers // every) if every else 0, regather=bool(trainer.reshard_after_forward))

    def lighter(self, n_layers: int, compiled: bool) -> Checkpointing | None:
        """The level with which to continue after memory ran out: half of the layers are checkpointed, or all layers if
        half of them are checkpointed already. None if all layers are checkpointed already.

        There are at most two such levels, because each costs a restart and another lease of the mini-batch.
        """
        half = -(-n_layers // 2)
        layers = half if self.layers < half else n_layers
        lighter = Checkpointing(layers, compiled and layers < n_layers)
        return None if lighter == self else lighter

    def includes(self, layer: int, n_layers: int) -> bool:
        """True if layer number `layer` keeps only its input; these layers are spread evenly over the model."""
        return layer * self.layers // n_layers != (layer - 1) * self.layers // n_layers


class Head(nn.Module):
    """The output head as a module that returns log-probabilities instead of logits."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, hidden_MD: Tensor, token_ids_M: Tensor, temperature_M: Tensor, support: Support | None
    ) -> TokenLogprobs:
        """The log-probabilities and entropies of `token_logprobs`, with the weight of this head."""
        return token_logprobs(hidden_MD, self.weight, token_ids_M, temperature_M, support=support)


class PolicyModel(nn.Module):
    """A causal language model over the rows of a micro-batch."""

    def __init__(self, backbone: PreTrainedModel, head: nn.Parameter | None) -> None:
        """`head`: [V, D] the weight of the output head; None: the head uses the weight of the embedding."""
        super().__init__()
        self.model: Any = backbone
        self.lm_head = None if head is None else Head(head)
        self._logit_scale = logit_scale(backbone.config)
        self._replay = RouterReplay(self.layers)

    def forward(self, micro: DeviceBatch) -> TokenLogprobs:
        """[M] log-probabilities of the tokens that carry loss, and entropies of their distributions."""
        self._replay.set(micro.routed_experts_SLK)
        output = self.model(
            input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **micro.attention
        )
        # the hidden state before a token predicts the token
        hidden_MD = output.last_hidden_state.flatten(0, 1).index_select(0, micro.state_M)
        temperature_M = micro.row_to_tokens(micro.temperature_R) / self._logit_scale
        if self.lm_head is None:
            head_VD = self.model.embed_tokens.weight
            return token_logprobs(hidden_MD, head_VD, micro.token_ids_M, temperature_M, support=micro.support)
        logprobs: TokenLogprobs = self.lm_head(hidden_MD, micro.token_ids_M, temperature_M, micro.support)
        return logprobs

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, in order."""
        layers: nn.ModuleList = self.model.layers
        return layers

    def units(self, regather: bool) -> dict[nn.Module, bool]:
        """The modules that are sharded separately. For each, True if its gathered weights are freed after the forward
        pass.

        The weights of the head are kept, because the backward pass begins with the head.
        """
        units: dict[nn.Module, bool] = dict.fromkeys(self.layers, regather)
        return units if self.lm_head is None else {self.model.embed_tokens: True, **units, self.lm_head: False}


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, trainer: TrainerConfig, checkpointing: Checkpointing | None = None
) -> PolicyModel:
    """The model on the meta device, where parameters take no memory. `checkpointing`: replaces the trainer's settings
    of gradient checkpointing."""
    own = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_sdpa
    implementation = ("sdpa" if own else "eager") if trainer.layout == "padded" else attention.NAME
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # grouped products, the default, do not support float64
    # the engine samples without dropout, and importance ratios are relative to the engine
    for name in config.to_dict():
        if name.endswith(DROPOUT):
            setattr(config, name, 0.0)
    config.pad_token_id = None  # with one, the embedding would drop that token's gradient
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    if getattr(whole.lm_head, "bias", None) is not None:
        raise UserError("its output head has a bias, which is not computed")
    layers = whole.model.layers
    if trainer.layout != "padded":
        use_packed_rows(layers)
    chosen = checkpointing or Checkpointing.of(trainer, len(layers))
    if trainer.compile:
        compile_layers(whole, chosen.elementwise)
    if chosen.layers:
        whole.gradient_checkpointing_enable({"use_reentrant": False})
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = chosen.includes(number, len(layers))
    model = PolicyModel(whole.model, None if config.tie_word_embeddings else whole.lm_head.weight)
    model.train()
    return model


def trained_shapes(config: PretrainedConfig, lora: LoraConfig | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of each trained weight by name: all weights of the model, or the weights of an adapter. Allocates no
    memory."""
    model = empty_model(config, torch.float32, TrainerConfig())
    if lora is not None:
        add_adapter(model, model.layers, lora, torch.float32)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}


def stored_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each weight that a folder of the model contains, trained or not, by name. Allocates no memory."""
    model = empty_model(config, torch.float32, TrainerConfig())
    return {name: tuple(weight.shape) for name, weight in [*model.named_parameters(), *stored_buffers(model).items()]}


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a folder of the model contains besides parameters (torch's buffers), by name. They are read, but
    not trained."""
    computed = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in computed}


def allocate(model: PolicyModel, config: PretrainedConfig, device: torch.device, on_cpu: bool = False) -> None:
    """Allocate memory for the parameters of an empty model; their values are undefined until they are loaded."""
    rotary = type(model.model.rotary_emb)
    model.to_empty(device="cpu" if on_cpu else device)
    # folders do not contain these buffers, so they are computed
    model.model.rotary_emb = rotary(config=config).to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        if module._non_persistent_buffers_set and module is not model.model.rotary_emb:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            model.model._init_weights(module)
