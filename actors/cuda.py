"""Refuses GPUs that PyTorch cannot use, because a run would otherwise train on the CPU without a message."""

from __future__ import annotations

import warnings

import torch


def unusable_cuda() -> str | None:
    """Return why PyTorch cannot use this machine's GPUs (built without CUDA, driver too old, or CUDA finds no
    device), or None if it can."""
    if torch.version.cuda is None:
        return "it was built without CUDA (`make` with PROFILE=cuda installs the other build)"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    # PyTorch only warns of a driver that is too old for its CUDA, and continues without it.
    first = str(said[0].message).splitlines()[0] if said else "CUDA found no device"
    return f"{first} (PyTorch's CUDA is {torch.version.cuda})"
