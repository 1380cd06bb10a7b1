"""Chooses the gradient checkpointing for `trainer.gradient_checkpointing: auto`: about as little as GPU memory allows.

Estimates may be wrong by a few percent, so a slightly slower step that leaves more memory free is preferred.

The choice depends on the memory that a layer keeps for its backward pass in addition to its input. For 16,384 tokens of
Qwen3-4B, in GB:

    not compiled 2.70     compiled 1.71     compiled, elementwise results recomputed 1.23     checkpointed 0
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from service.learn.compile import as_on_gpu, memory_budget
from service.learn.estimate.gpus import REACHED
from service.learn.estimate.step import StepEstimate, estimate_step, fake_policy, full_mini_batch
from service.learn.model.hf_config import read_config
from service.learn.model.policy_model import Checkpointing
from service.learn.settings import LearnSettings

NEARLY_AS_FAST = 1.03
"""Largest time of a step that leaves ample memory free, relative to the fastest step that fits; a slower step is not
chosen."""


def choose_checkpointing(
    settings: LearnSettings, folder: Path, room: Callable[[StepEstimate], tuple[float, float]], compiled: bool
) -> tuple[Checkpointing, StepEstimate]:
    """Choose the checkpointing and return it with the estimate of its step. The fastest step that fits is chosen, or a
    step that leaves ample memory free if it is nearly as fast.

    `room` takes an estimate and returns two numbers of bytes: what a step may use to fit, and what it may use to leave
    ample memory free. In the returned estimate, FLOPs, bytes of collectives and times are for checkpointing of all
    layers.
    """
    n_layers: int = read_config(folder).num_hidden_layers
    all_layers = Checkpointing.of(settings.trainer, n_layers)._replace(layers=n_layers)
    least = estimate_step(settings, folder, checkpointing=all_layers)
    usable, ample = room(least)

    @cache
    def kept(elementwise: bool) -> float:
        """Bytes that a layer without checkpointing keeps."""
        if compiled:
            return kept_by_compiled_layer(settings, folder, elementwise)
        most = estimate_step(settings, folder, checkpointing=all_layers._replace(layers=0))
        return (most.peak_bytes - least.peak_bytes) / n_layers

    def held(level: Checkpointing) -> float:
        return (n_layers - level.layers) * kept(level.elementwise) if level.layers < n_layers else 0.0

    def seconds(level: Checkpointing) -> float:
        """Seconds of a micro-batch; recomputed elementwise results are written and read once more."""
        whole = least.fused_seconds if compiled else sum(least.seconds.values())
        again = 1 - least.model_flops / least.flops if least.flops else 0.0
        moved = 2 * (kept(False) - kept(True)) if level.elementwise else 0.0
        return (
            whole * (1 - again)
            + whole * again * level.layers / n_layers
            + ((n_layers - level.layers) * moved / REACHED.bandwidth)
        )

    levels = [all_layers._replace(layers=0)]
    levels += [all_layers._replace(layers=layers, elementwise=compiled) for layers in range(n_layers)]
    levels += [all_layers]
    fastest, comfortable = (
        next((level for level in levels if least.peak_bytes + held(level) <= bound), all_layers)
        for bound in (usable, ample)
    )
    chosen = comfortable if seconds(comfortable) <= seconds(fastest) * NEARLY_AS_FAST else fastest
    peak = {**least.peak, "activations": least.peak.get("activations", 0) + round(held(chosen))}
    return chosen, replace(least, peak=peak)


class _Reached(Exception):
    """Raised to stop the forward pass at the first layer."""


def kept_by_compiled_layer(settings: LearnSettings, folder: Path, elementwise: bool = False) -> float:
    """Bytes that a compiled layer keeps for its backward pass in a full micro-batch, apart from its input.

    Torch's own partitioner decides on the graph of one layer which results are kept. `elementwise`: whether the results
    of elementwise operations are recomputed.
    """
    # a rank has the same number of tokens whether or not it shares micro-batches with other ranks
    plain: dict[str, object] = {"ranks": 1, "shard_one_rank": False, "sequence_parallel": 1}
    plain |= {"compile": False, "fused_kernels": False, "layout": "packed"}
    alone = replace(settings, trainer=settings.trainer.model_copy(update=plain))
    row_tokens = min(settings.longest_row, settings.trainer.max_tokens_per_micro_batch)
    batch = full_mini_batch(alone.trainer, read_config(folder).vocab_size, row_tokens)
    reached: list[Any] = []

    def reach(_: Any, arguments: Any, named: Any) -> None:
        reached.extend((arguments, named))
        raise _Reached

    with FakeTensorMode(allow_non_fake_inputs=True), as_on_gpu(lambda function, *arguments: function(*arguments)):
        policy = fake_policy(alone, folder, Checkpointing(0))
        layer = policy.model.layers[0]
        with layer.register_forward_pre_hook(reach, with_kwargs=True), suppress(_Reached):
            policy.model(policy.to_device(batch.ranks[0][0]))
        arguments, named = reached
        return _kept(layer, arguments, named, elementwise)


def _kept(layer: torch.nn.Module, arguments: Any, named: dict[str, Any], elementwise: bool) -> float:
    """Bytes kept between the forward and backward pass of a layer, called with these arguments."""
    packing = named["packing"]  # torch cannot flatten it into tensors
    leaves, tree = tree_flatten((arguments, named | {"packing": packing.cu_seqlens}, dict(layer.named_parameters())))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def call(*tensors: Tensor) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(places, tensors, strict=True))
        arguments, named, parameters = tree_unflatten(list(given.values()), tree)
        bounds = replace(packing, cu_seqlens=named["packing"])
        return functional_call(layer, parameters, arguments, named | {"packing": bounds})

    forward: list[torch.fx.Graph] = []

    def record(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        forward.append(gm.graph)
        return make_boxed_func(gm)

    tensors = [leaves[place].detach().requires_grad_(leaves[place].requires_grad) for place in places]
    traced = aot_function(
        call,
        fw_compiler=record,
        bw_compiler=lambda gm, example_inputs: make_boxed_func(gm),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    with torch._functorch.config.patch(activation_memory_budget=memory_budget(elementwise)):
        traced(*tensors)
    return _new_bytes(forward[0])


def _new_bytes(forward: torch.fx.Graph) -> float:
    """Bytes of the new storages that a graph returns, apart from its first result, the output of the layer."""

    def storages(nodes: Any) -> dict[Any, int]:
        found = (node.meta["val"] for node in nodes if isinstance(node, torch.fx.Node))
        return {x.untyped_storage(): x.untyped_storage().nbytes() for x in found if isinstance(x, Tensor)}

    results: Any = forward.output_node().args[0]
    output, *kept = results
    given = storages((output, *forward.find_nodes(op="placeholder")))
    return float(sum(size for storage, size in storages(kept).items() if storage not in given))
