"""Frozen weights: this rank's shards of the policy as they once were, for the reference and the proximal anchor.

They are exchanged with the trained weights for a forward pass and exchanged back, so that they need neither a second
model nor a second set of gathered layers: float32, sharded like the masters, on the device or in CPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from service.config.learn import AlgorithmConfig
from service.learn.device_batch import DeviceBatch
from service.learn.model.master_weights import Masters
from service.learn.model.policy import Policy


class FrozenWeights:
    """A copy of the masters."""

    def __init__(self, masters: Masters, on_cpu: bool) -> None:
        self._masters = masters
        self.tensors = {
            name: master.to("cpu" if on_cpu else master.device, copy=True) for name, master in masters.tensors.items()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the copy anew."""
        for name, master in self._masters.tensors.items():
            self.tensors[name].copy_(master)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While this lasts, the model computes with the frozen weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, master in self._masters.tensors.items():
            kept = master.clone()
            master.copy_(self.tensors[name])
            self.tensors[name].copy_(kept)
        self._masters.write_back()


class FrozenPolicies:
    """The frozen weights that a configuration asks for, taken and renewed at the right steps."""

    def __init__(self, algorithm: AlgorithmConfig, policy: Policy) -> None:
        self._policy = policy
        self._on_cpu = algorithm.reference.on_cpu
        self._every: dict[str, int] = {}
        if algorithm.anchor == "proximal" and algorithm.anchor_every > 1:
            self._every["proximal"] = algorithm.anchor_every
        if algorithm.kl_coef > 0:
            self._every["reference"] = algorithm.reference.refresh_every
        self.frozen: dict[str, FrozenWeights] = {}
        self.taken_at: dict[str, int] = {}

    def logprobs(self, name: str, placed: Sequence[DeviceBatch], step: int) -> list[Tensor] | list[None]:
        """[M] per micro-batch under the frozen weights `name`; None where they are the weights as they are."""
        if name not in self._every:
            return [None] * len(placed)
        self._renew(name, step)
        with self.frozen[name].in_place():
            return self._policy.logprobs(placed)

    def hold(self, name: str, taken_at: int) -> FrozenWeights:
        """A place for frozen weights that a checkpoint brings back."""
        self.frozen[name] = FrozenWeights(self._policy.masters, self._on_cpu)
        self.taken_at[name] = taken_at
        return self.frozen[name]

    def _renew(self, name: str, step: int) -> None:
        every = self._every[name]
        if name not in self.frozen:
            self.frozen[name] = FrozenWeights(self._policy.masters, self._on_cpu)
        elif every and step - self.taken_at[name] >= every:
            self.frozen[name].refresh()
        else:
            return
        self.taken_at[name] = step
