"""AdamW over master weights, with clipping by the norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from service.learn.model.master_weights import Masters

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each weight."""


class Optimizer:
    """AdamW; the learning rate comes with each step."""

    def __init__(self, masters: Masters, betas: tuple[float, float], weight_decay: float) -> None:
        self._masters = masters
        self.adam = torch.optim.AdamW(
            list(masters.tensors.values()), lr=0.0, betas=betas, weight_decay=weight_decay, fused=True
        )

    def step(self, lr: float, grad_norm: float, max_grad_norm: float) -> None:
        """One step on the gradients that the masters hold, scaled down to `max_grad_norm`; then forget them."""
        gradients = self._masters.gradients()
        if grad_norm > max_grad_norm:
            torch._foreach_mul_(gradients, max_grad_norm / grad_norm)
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        self._masters.write_back()
        self._masters.drop_gradients()

    def moments(self) -> dict[str, Tensor]:
        """Adam's two moments of every master, by name; zeros before the first step."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.tensors.items():
            state = self.adam.state[master]
            if not state:
                state["step"] = torch.zeros((), device=master.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
            found |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
        return found

    def set_steps(self, steps: int) -> None:
        """Count on from this many steps."""
        for state in self.adam.state.values():
            state["step"].fill_(steps)


def square_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over these gradients, in float64, on the device."""
    norms = torch._foreach_norm(list(gradients))
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([norm.to(device) for norm in norms]).double().square().sum()
