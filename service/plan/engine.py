"""How fast an engine generates: a roofline for each iteration, in which running requests take a token each.

an iteration: weights and KV caches are read (memory), tokens are multiplied with the weights (compute); the longer
of the two counts, then collectives of the engine's GPUs, then what the host does between iterations
"""

from __future__ import annotations

from dataclasses import dataclass

from service.plan.machine.device import Device
from service.plan.shape import Shape

GPU_ITERATION, GPU_REQUEST = 1.5e-3, 10e-6
"""Host seconds of an iteration of an engine on a GPU, and of each running request in it: scheduling, sampling, sending
tokens. vLLM overlaps part of it with the GPU; assumed, not measured here."""
ALL_REDUCE_SECONDS = 12e-6
"""Latency of a collective of one token's activations within a node, of which a layer has two; assumed."""


@dataclass(frozen=True)
class Engine:
    """An engine of `gpus` GPUs with tensor parallelism."""

    shape: Shape
    device: Device
    gpus: int
    kv_bytes: float
    """KV cache on each GPU."""
    iteration_host: float = GPU_ITERATION
    request_host: float = GPU_REQUEST

    def most_running(self, context: float) -> float:
        """Requests of this length that the KV cache holds at once, at least one."""
        return max(1.0, self.kv_bytes / (self.shape.kv_token_bytes(self.gpus) * max(context, 1.0)))

    def iteration(self, running: float, context: float, prefill: float = 0.0) -> float:
        """Seconds of an iteration: a token for each running request of mean length `context`, and `prefill` tokens."""
        shape, device = self.shape, self.device
        tokens = running + prefill
        weights = shape.read_parameters(tokens) * shape.width / self.gpus
        caches = running * context * shape.kv_token_bytes(self.gpus)
        memory = (weights + caches) / device.bandwidth
        compute = 2 * shape.of_token * tokens / self.gpus / device.products
        attention = 2 * shape.layers * shape.query_width * context * prefill / self.gpus / device.attention
        return max(memory, compute) + attention + self._collectives(tokens) + self.host_seconds(running)

    def host_seconds(self, running: float) -> float:
        """Seconds of an iteration in which the device waits for the host."""
        return self.iteration_host + self.request_host * running

    def _collectives(self, tokens: float) -> float:
        """Seconds of the two all-reduces of each layer; over more GPUs than a node has, by the network."""
        if self.gpus == 1:
            return 0.0
        rate = self.device.link if self.gpus <= 8 else self.device.network
        each = tokens * self.shape.hidden * self.shape.width * 2 * (self.gpus - 1) / self.gpus / rate
        return 2 * self.shape.layers * (ALL_REDUCE_SECONDS + each)

    def prefill_seconds(self, tokens: float, context: float) -> float:
        """Seconds to compute so many tokens of requests whose mean length is `context`, nothing else running."""
        return self.iteration(0, context, tokens) - self.host_seconds(0)
