"""Compiles small elementwise functions and decoder layers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from service.config.learn import TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
"""Torch's environment variable for the number of processes that compile kernels."""
MOST_COMPILE_THREADS = 32

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_on_gpu(function: Function) -> Function:
    """Decorator: compile the function for CUDA tensors, which saves passes over memory; run it uncompiled for CPU
    tensors.

    The first argument must be a tensor. The uncompiled function is available as `__wrapped__`.
    """

    @cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def choose(first: Tensor, *others: Any) -> Any:
        use_compiled = first.is_cuda and compiler_works(first.device)
        return compiled()(first, *others) if use_compiled else function(first, *others)

    return cast(Function, choose)


@cache
def compiler_works(device: torch.device) -> bool:
    """True if torch's compiler can compile and differentiate a small function on the device; otherwise logs a warning.

    The compiler needs a C compiler and Python's headers on the machine, which neither torch nor CUDA include.
    """
    try:
        with torch.enable_grad():  # the first call may come from inside an autograd function
            x = torch.ones(8, 8, device=device, requires_grad=True)
            torch.compile(lambda x: (x * x.sigmoid()).sum(), dynamic=True)(x).backward()
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises, training is possible without it
        why = (str(error).strip().splitlines() or [""])[0]
        log.warning("torch.compile does not work on %s (%s: %s): layers run eagerly", device, type(error).__name__, why)
        return False
    return True


def compiles_layers(trainer: TrainerConfig, device: torch.device | None, compute: torch.dtype) -> bool:
    """True if decoder layers are compiled. `trainer.compile` decides if it is set. Otherwise layers are compiled if
    they compute in bfloat16 on a GPU on which torch's compiler works.

    The device None stands for a GPU of another machine, whose compiler is assumed to work. A bfloat16 layer needs one
    compiled graph, which serves any number of tokens. A layer with experts needs one graph before the experts and one
    after them, because experts run uncompiled. A float32 layer would need several graphs, because the number of
    attention buckets changes with every micro-batch.
    """
    if trainer.compile is not None:
        return trainer.compile
    if compute != torch.bfloat16:
        return False
    return device is None or (device.type == "cuda" and compiler_works(device))


def share_cores(ranks_of_host: int) -> None:
    """Set the number of processes of this rank's compiler to the rank's share of the host's cores, at most 32. The
    environment variable TORCHINDUCTOR_COMPILE_THREADS takes precedence."""
    if COMPILE_THREADS not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch._inductor.config.compile_threads = max(1, min(cores // ranks_of_host, MOST_COMPILE_THREADS))


def stop_compiling() -> None:
    """From now on, compile nothing: code that was not compiled yet runs uncompiled. So no rank waits in a collective
    for a rank that compiles."""
    torch.compiler.set_stance("eager_on_recompile")


def compile_layers(model: PreTrainedModel, recompute_elementwise: bool = False) -> None:
    """Compile the decoder layers.

    `recompute_elementwise`: the backward pass recomputes results of elementwise operations instead of keeping them.
    """
    # with 1, torch keeps the results that make a step fastest; below 1, it recomputes elementwise results, and others
    # if that does not save enough memory
    torch._functorch.config.activation_memory_budget = 0.9 if recompute_elementwise else 1.0
    for layer in model.model.layers:
        layer.compile(dynamic=True)
