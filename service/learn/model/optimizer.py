"""Master weights: the tensors that the optimizer updates, one per trained parameter; and AdamW over them, with clipping
by the gradient norm over all ranks, and the learning rate schedule.

The optimizer works on the local shards as plain tensors, which gives the same result as with distributed tensors and
saves the cost of dispatching each operation.

| | parameters | master weights |
|---|---|---|
| sharded (FSDP2) | float32 shards; gathered in the compute type | the same storage |
| unsharded, float32 | float32 | the same storage |
| unsharded, bfloat16 or offloaded | compute type | float32 copies (on the CPU if offloaded); gradients add up in them |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from service.config.learn import TrainerConfig
from service.learn.model.host_copies import host_copy
from service.learn.model.logprob import accumulation_dtype
from service.learn.model.sharding import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of the two moments that Adam keeps for each weight."""


class MasterWeights:
    """The weights that the optimizer updates, float32 (float64 in tests): one plain local tensor per trained
    parameter."""

    def __init__(self, model: nn.Module, compute: torch.dtype, sharded: bool, cpu_offload: bool) -> None:
        named = model.named_parameters()
        self.parameters: dict[str, nn.Parameter] = {name: p for name, p in named if p.requires_grad}
        """The trained parameters: those of the whole model, or of the adapter."""
        self._copied = not sharded and (cpu_offload or compute == torch.bfloat16)
        self._on_cpu = cpu_offload
        self.tensors: dict[str, Tensor] = {name: self._master(p) for name, p in self.parameters.items()}
        if self._copied:
            for name, parameter in self.parameters.items():
                hook = _adds_to(self.tensors[name], self._on_cpu)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if not self._copied:
            return local_shard(parameter.detach())
        dtype = accumulation_dtype(parameter.dtype)
        return host_copy(parameter, dtype) if self._on_cpu else parameter.detach().to(dtype, copy=True)

    def gradients(self) -> list[Tensor]:
        """Move the parameters' gradients to the master weights and return them; parameters without a gradient are left
        out."""
        if not self._copied:
            for name, parameter in self.parameters.items():
                self.tensors[name].grad = None if parameter.grad is None else local_shard(parameter.grad)
        return [master.grad for master in self.tensors.values() if master.grad is not None]

    def drop_gradients(self) -> None:
        """Set the gradients of all weights to None."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.tensors[name].grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the changed master weights into the parameters."""
        if self._copied:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.tensors[name])


def randomize(weights: Iterable[Tensor]) -> None:
    """Fill weights with initial values: vectors (norms, biases) with ones, matrices with small normal random
    numbers."""
    for weight in weights:
        weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(std=0.02)


def _adds_to(master: Tensor, on_cpu: bool) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's gradient to its master weight.

    The hook does not refer to the parameters. If it did, Python could not free them, because its garbage collector does
    not follow hooks in reference cycles.
    """

    def accumulate(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = host_copy(parameter.grad) if on_cpu else parameter.grad
        if master.grad is None:
            master.grad = gradient.to(master.dtype, copy=not on_cpu)
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return accumulate


class Optimizer:
    """AdamW over the master weights; each step gets its learning rate as an argument."""

    def __init__(self, master_weights: MasterWeights, betas: tuple[float, float], weight_decay: float) -> None:
        self._master_weights = master_weights
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
        for name, master in master_weights.tensors.items():  # norms and biases; an expert's bias has two axes
            groups[master.ndim < 2 or name.endswith("bias")]["params"].append(master)
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, lr: float, grad_norm: float, max_grad_norm: float) -> None:
        """Take an optimizer step with the gradients of the master weights, clipped to the norm `max_grad_norm`; then
        drop the gradients."""
        gradients = self._master_weights.gradients()
        if grad_norm > max_grad_norm:
            torch._foreach_mul_(gradients, max_grad_norm / grad_norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._master_weights.write_back()
        self._master_weights.drop_gradients()

    def moments(self) -> dict[str, Tensor]:
        """Adam's two moments of every master weight, under the names `moment/weight`; zeros before the first step."""
        moments: dict[str, Tensor] = {}
        for name, master in self._master_weights.tensors.items():
            state = self._adam.state[master]
            if not state:
                state["step"] = torch.zeros((), device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            moments |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
        return moments

    def set_steps(self, steps: int) -> None:
        """Set the number of optimizer steps taken so far, on which Adam's bias correction depends."""
        for state in self._adam.state.values():
            state["step"].fill_(steps)


def square_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all entries of these gradients, in float64, on the device."""
    norms = torch._foreach_norm(list(gradients))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.to(device) for norm in norms]).double().square().sum()


def learning_rate(trainer: TrainerConfig, step: int, max_steps: int) -> float:
    """The learning rate after `step` optimizer steps: linear warm-up, then the schedule until `max_steps`."""
    if step < trainer.warmup_steps:
        return trainer.lr * (step + 1) / trainer.warmup_steps
    done = min(1.0, (step - trainer.warmup_steps) / max(1, max_steps - trainer.warmup_steps))
    match trainer.schedule:
        case "constant":
            remaining = 1.0
        case "linear":
            remaining = 1.0 - done
        case "cosine":
            remaining = (1.0 + math.cos(math.pi * done)) / 2
    return trainer.lr * (trainer.min_lr_fraction + (1.0 - trainer.min_lr_fraction) * remaining)
