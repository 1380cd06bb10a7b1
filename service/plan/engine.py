"""Predicts the speed of an engine by a roofline model of one iteration. In an iteration each running request gets one
token.

An iteration takes the longer of two times: the time to read weights and KV caches (memory), and the time to multiply
tokens with the weights (compute). The times of the attention of prefilled tokens, of collectives among the engine's
GPUs, and of work of the host are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.learn.model.router_replay import routing_of_model
from service.model_folder import experts_of
from service.plan.machine.costs import GPU
from service.plan.machine.device import Device

UNGATED = ("arcee", "starcoder2")
"""Families whose MLPs have two matrices, without a gate; the others have three."""


@dataclass(frozen=True)
class Shape:
    """The shape of a text decoder of a supported family, dense or with experts."""

    layers: int
    hidden: int
    attention: float
    """Number of parameters of the attention of a layer."""
    shared: float
    """Number of parameters of the MLPs in a layer through which every token passes, mean over the layers."""
    expert: float
    """Number of parameters of one routed expert; 0: the layers are dense."""
    expert_layers: int
    """Number of layers with experts."""
    experts: int
    experts_of_token: int
    embedding: float
    """Number of parameters of the embedding, and of the head if the two are not tied."""
    head: float
    query_width: int
    """Number of query heads times their dimension."""
    kv_layers: int
    """Number of layers with keys and values: all but those of linear attention."""
    kv_heads: int
    head_dim: int
    width: float = 2.0
    """Bytes of a parameter, and of a number in the KV cache."""

    @classmethod
    def of(cls, model: Any, width: float = 2.0) -> Shape:
        """Read the shape from a `config.json` as loaded by transformers."""
        hidden, heads = model.hidden_size, model.num_attention_heads
        head_dim = getattr(model, "head_dim", None) or hidden // heads
        experts, layers = experts_of(model), model.num_hidden_layers
        expert_layers = routing_of_model(model).layers[-1] if experts else 0
        width_of_mlp = getattr(model, "intermediate_size", 0)
        width_of_expert = getattr(model, "moe_intermediate_size", width_of_mlp)
        mlp = (2 if model.model_type in UNGATED else 3) * hidden * width_of_mlp
        shared_width = getattr(model, "shared_expert_intermediate_size", 0) or 0
        shared_width = shared_width or (getattr(model, "n_shared_experts", 0) or 0) * width_of_expert
        shared = (expert_layers * 3 * hidden * shared_width + (layers - expert_layers) * mlp) / layers
        head = float(model.vocab_size * hidden)
        return cls(
            layers=layers,
            hidden=hidden,
            attention=2.0 * hidden * head_dim * (heads + model.num_key_value_heads),
            shared=shared,
            expert=3.0 * hidden * width_of_expert if experts else 0.0,
            expert_layers=expert_layers,
            experts=experts,
            experts_of_token=getattr(model, "num_experts_per_tok", 0) or 0,
            embedding=head if model.tie_word_embeddings else 2 * head,
            head=head,
            query_width=heads * head_dim,
            kv_layers=layers - (getattr(model, "layer_types", None) or []).count("linear_attention"),
            kv_heads=model.num_key_value_heads,
            head_dim=head_dim,
            width=width,
        )

    @property
    def parameters(self) -> float:
        """Number of all parameters, without norms."""
        routed = self.expert_layers * self.experts * self.expert
        return self.layers * (self.attention + self.shared) + routed + self.embedding

    @property
    def of_token(self) -> float:
        """Number of parameters that a token is multiplied with, including the head."""
        routed = self.expert_layers * self.experts_of_token * self.expert
        return self.layers * (self.attention + self.shared) + routed + self.head

    def adapter_parameters(self, rank: int) -> float:
        """Number of parameters of a low-rank adapter on all matrices of attention and of dense MLPs."""
        attention = 4 * self.hidden + 2 * self.query_width + 2 * self.kv_heads * self.head_dim
        mlp = 0.0 if self.experts else 3 * (self.hidden + self.shared / (3 * self.hidden))
        return self.layers * rank * (attention + mlp)

    def read_parameters(self, tokens: float) -> float:
        """Number of parameters that a forward pass over `tokens` tokens reads. Of the experts, only the experts that at
        least one token chose are read."""
        chosen = 1 - (1 - self.experts_of_token / self.experts) ** tokens if self.experts else 0.0
        routed = self.expert_layers * chosen * self.experts * self.expert
        return self.layers * (self.attention + self.shared) + routed + self.head

    def kv_token_bytes(self, tensor_parallel: int = 1) -> float:
        """Bytes of a token's keys and values on each GPU of an engine."""
        return 2 * self.kv_layers * max(1, self.kv_heads // tensor_parallel) * self.head_dim * self.width


@dataclass(frozen=True)
class Engine:
    """An engine of `gpus` GPUs with tensor parallelism."""

    shape: Shape
    device: Device
    gpus: int
    kv_bytes: float
    """Bytes of the KV cache on each GPU."""
    iteration_host: float = GPU["iteration"]
    request_host: float = GPU["request"]

    def most_running(self, context: float) -> float:
        """Maximum number of requests of `context` tokens that the KV cache holds; at least one."""
        return max(1.0, self.kv_bytes / (self.shape.kv_token_bytes(self.gpus) * max(context, 1.0)))

    def iteration(self, running: float, context: float, prefill: float = 0.0) -> float:
        """Seconds of an iteration that computes one token for each of `running` requests, and `prefill` prompt tokens.

        The requests have `context` tokens on average.
        """
        shape, device = self.shape, self.device
        tokens = running + prefill
        weights = shape.read_parameters(tokens) * shape.width / self.gpus
        caches = running * context * shape.kv_token_bytes(self.gpus)
        memory = (weights + caches) / device.bandwidth
        compute = 2 * shape.of_token * tokens / self.gpus / device.products
        attention = 2 * shape.layers * shape.query_width * context * prefill / self.gpus / device.attention
        return max(memory, compute) + attention + self._collectives(tokens) + self.host_seconds(running)

    def host_seconds(self, running: float) -> float:
        """Seconds of an iteration with `running` requests in which the GPUs wait for the host."""
        return self.iteration_host + self.request_host * running

    def _collectives(self, tokens: float) -> float:
        """Seconds of the two all-reduces of each layer, over the network if the engine is larger than a node."""
        if self.gpus == 1:
            return 0.0
        each = tokens * self.shape.hidden * self.shape.width * 2 * (self.gpus - 1) / self.gpus
        each /= self.device.ring(self.gpus)
        return 2 * self.shape.layers * (GPU["all_reduce"] + each)

    def prefill_seconds(self, tokens: float, context: float) -> float:
        """Seconds that the GPUs take to prefill `tokens` tokens if no other request runs; the requests have `context`
        tokens on average."""
        return self.iteration(0, context, tokens) - self.host_seconds(0)
