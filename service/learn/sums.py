"""Sums and maxima that a step collects on the device; one collective and one wait for the device at its end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Sums:
    """Named sums and maxima over all micro-batches of all ranks. Every rank must collect the same names."""

    def __init__(self, device: torch.device, world: int) -> None:
        self._device = device
        self._world = world
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar; or a vector, whose entries become `name/0`, `name/1`, ..."""
        value = value.detach().to(torch.float64).reshape(-1)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def max(self, name: str, value_M: Tensor) -> None:
        """Keep the largest of these values; `-inf` where there are none."""
        floor = torch.full((1,), -torch.inf, dtype=torch.float64, device=self._device)
        value = torch.cat([floor, value_M.detach().to(torch.float64)]).amax(0, keepdim=True)
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def totals(self) -> dict[str, float]:
        """All values over all ranks, the same on every rank; waits for the device."""
        mine = torch.cat([*self._sums.values(), *self._maxima.values()])
        parts = [mine]
        if self._world > 1:
            parts = [torch.empty_like(mine) for _ in range(self._world)]
            dist.all_gather(parts, mine)
        ranks, n_sums = torch.stack(parts), len(mine) - len(self._maxima)
        totals = torch.cat([ranks[:, :n_sums].sum(0), ranks[:, n_sums:].amax(0)])
        return dict(zip(self._names(), totals.tolist(), strict=True))

    def _names(self) -> list[str]:
        names = []
        for name, value in self._sums.items():
            names += [name] if len(value) == 1 else [f"{name}/{i}" for i in range(len(value))]
        return [*names, *self._maxima]
