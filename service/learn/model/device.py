"""Arrays from the host to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of an array on the device; the host does not wait for it."""
    # a copy: arrays out of shared memory are read-only, and torch does not know that
    host = torch.from_numpy(array.copy())
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
