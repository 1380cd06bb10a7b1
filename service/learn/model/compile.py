"""Functions of many elementwise operations, compiled into few kernels where that pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def fused_on_gpu(function: Function) -> Function:
    """Decorator: compile on CUDA, where each pass over memory counts; run as written on CPU.

    The first argument must be a tensor. The plain function stays at `__wrapped__`.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def choose(first: Tensor, *others: Any) -> Any:
        return compiled()(first, *others) if first.is_cuda else function(first, *others)

    return cast(Function, choose)
