"""What is compiled: small functions of elementwise operations, the decoder layers, and Liger's fused kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from service.config.learn import TrainerConfig
from service.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_on_gpu(function: Function) -> Function:
    """Decorator: compile on CUDA, where each pass over memory costs time; run as written on CPU.

    The first argument must be a tensor. The plain function stays at `__wrapped__`.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def choose(first: Tensor, *others: Any) -> Any:
        return compiled()(first, *others) if first.is_cuda else function(first, *others)

    return cast(Function, choose)


def compile_layers(model: PreTrainedModel, trainer: TrainerConfig) -> None:
    """Replace modules by Liger's fused kernels and compile the decoder layers, as configured.

    Raises:
        UserError: `trainer.fused_kernels` is set and Liger is not installed.
    """
    if trainer.fused_kernels:
        try:
            liger = importlib.import_module("liger_kernel.transformers")
        except ImportError as error:
            raise UserError(
                f"trainer.fused_kernels: liger-kernel cannot be imported ({error}); install it, or set false"
            ) from error
        liger._apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)
    if trainer.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=True)
