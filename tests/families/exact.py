"""Computes in float64 throughout, for proofs; the norms and routers of model families would otherwise round to
float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CASTS = (Tensor.to, Tensor.type)


class Exact(TorchFunctionMode):
    """Within the block, conversions of float64 tensors to float32 are skipped."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(named or {})
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in arguments):
            if function is Tensor.float:
                return arguments[0]
            if function in CASTS:
                arguments = tuple(_wide(x) for x in arguments)
            options = {name: _wide(x) for name, x in options.items()}
        return function(*arguments, **options)


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it computes in float64 throughout."""

    @wraps(function)
    def exact(*arguments: Any, **named: Any) -> Any:
        with Exact():
            return function(*arguments, **named)

    return exact


def _wide(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x
