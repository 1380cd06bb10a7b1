"""Frozen weights: copies of the policy at an earlier step, for the KL reference and the proximal anchor.

Each rank copies its shard of the master weights (float32, on the device or in CPU memory). For a forward pass the copy
is swapped with the trained weights and afterwards swapped back, so no second model is needed. If an adapter is trained,
only the adapter is copied. The KL reference is then the base model without the adapter, unless the reference is renewed
(`algorithm.reference.refresh_every`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from service.config.learn import AlgorithmConfig
from service.learn.device_batch import DeviceBatch
from service.learn.model.policy import Policy


class FrozenWeights:
    """The frozen copies of the policy's weights, by kind: `proximal` for the proximal anchor, `reference` for the KL
    term. Only the kinds that the configuration needs are copied."""

    def __init__(self, algorithm: AlgorithmConfig, policy: Policy) -> None:
        self._policy = policy
        self._on_cpu = algorithm.reference.on_cpu
        self._refresh_every: dict[str, int] = {}
        """Optimizer steps after which each kind of copy is renewed; 0: never. A proximal anchor that would be renewed
        at every step is the current policy, and needs no copy."""
        if algorithm.anchor == "proximal" and algorithm.anchor_every > 1:
            self._refresh_every["proximal"] = algorithm.anchor_every
        self._reference_is_base = policy.lora is not None and not algorithm.reference.refresh_every
        if algorithm.kl_coef > 0:
            self._refresh_every["reference"] = algorithm.reference.refresh_every
        self.copies: dict[str, dict[str, Tensor]] = {}
        """The copied tensors, by kind and by name of the weight."""
        self.taken_at: dict[str, int] = {}
        """Number of optimizer steps of the policy when the copy was made, by kind."""

    def logprobs(self, kind: str, micros: Sequence[DeviceBatch], step: int) -> list[Tensor] | list[None]:
        """For each micro-batch, [M] the log-probabilities of its loss tokens under the frozen weights; None for each
        micro-batch if they are not needed."""
        if kind not in self._refresh_every:
            return [None] * len(micros)
        if kind == "reference" and self._reference_is_base:
            return self._policy.base_logprobs(micros)
        every = self._refresh_every[kind]
        if kind not in self.copies or (every and step - self.taken_at[kind] >= every):
            self.take(kind, step)
        self._exchange(kind)
        try:
            return self._policy.logprobs(micros)
        finally:
            self._exchange(kind)

    @torch.no_grad()
    def take(self, kind: str, step: int) -> None:
        """Copy the current weights as frozen weights; `step`: the number of optimizer steps taken so far."""
        self.taken_at[kind] = step
        masters = self._policy.master_weights.tensors
        if kind not in self.copies:
            self.copies[kind] = {
                name: master.to("cpu" if self._on_cpu else master.device, copy=True) for name, master in masters.items()
            }
            return
        for name, master in masters.items():
            self.copies[kind][name].copy_(master)

    @torch.no_grad()
    def _exchange(self, kind: str) -> None:
        """Exchange the frozen weights with the weights of the model."""
        copies = self.copies[kind]
        for name, master in self._policy.master_weights.tensors.items():
            kept = master.clone()
            master.copy_(copies[name])
            copies[name].copy_(kept)
        self._policy.master_weights.write_back()
