"""AdamW over master weights, with clipping by the gradient norm over all ranks, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from service.config.learn import TrainerConfig
from service.learn.model.master_weights import MasterWeights

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Torch's names of the two moments that Adam keeps for each weight."""


class Optimizer:
    """AdamW over the master weights; each step gets its learning rate as an argument."""

    def __init__(self, master_weights: MasterWeights, betas: tuple[float, float], weight_decay: float) -> None:
        self._master_weights = master_weights
        self._adam = torch.optim.AdamW(
            list(master_weights.tensors.values()), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )

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
