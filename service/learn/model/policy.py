"""The policy on one rank: its shards of the model, and the master weights behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from service.config.tree import Config
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.model.attention import use_fastest_attention
from service.learn.model.compile import compiles_layers, on_gpu
from service.learn.model.experts import split_experts
from service.learn.model.hf_checkpoint import load_weights, write_folder
from service.learn.model.hf_config import read_config
from service.learn.model.logprob import accumulation_dtype
from service.learn.model.master_weights import MasterWeights
from service.learn.model.policy_model import Checkpointing, allocate, empty_model
from service.learn.model.sequence_parallel import Slice
from service.learn.model.sharding import full_state_dict, ranks_by_node, reshard, shard
from service.types import MicroBatch


class Policy:
    """A model from a Hugging Face folder; every rank calls the same methods in the same order."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        device: torch.device,
        rank: int,
        world_size: int,
        random_weights: bool = False,
        nodes: Sequence[str] | None = None,
        checkpointing: Checkpointing | None = None,
    ) -> None:
        """`random_weights`: draw them instead of reading them, where only the model's shape matters; `nodes`: the node
        of each rank, None if all are on one; `checkpointing`: in place of `trainer.gradient_checkpointing`."""
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.accumulation_dtype = accumulation_dtype(self.dtype)
        self._folder = folder
        trainer = config.trainer
        copies = [list(range(world_size))] if nodes is None or trainer.shard_within == "all" else ranks_by_node(nodes)
        self.n_copies, self.n_shards = len(copies), len(copies[0])
        """Whole copies of the policy among the ranks; shards of each."""
        self.copy = next(number for number, ranks in enumerate(copies) if rank in ranks)
        self.shard = copies[self.copy].index(rank)
        """Number of this rank's shard in its copy."""
        hf_config = read_config(folder)
        with unset_fake_temporarily():  # a mesh of ranks cannot be made of fake tensors
            self.slice = Slice.of_rank(rank, world_size, trainer.sequence_parallel, hf_config, device)
        self.batch_part, self.n_batch_parts = rank // self.slice.of, world_size // self.slice.of
        """Which part of each mini-batch this rank's group trains, and of how many."""
        self._device_settings = DeviceSettings(
            device,
            self.accumulation_dtype,
            config.algorithm.reduction,
            trainer.layout,
            variable_length=on_gpu(device) and self.dtype == torch.bfloat16,
            part=self.slice,
        )
        use_fastest_attention(device)
        self.vocab_size: int = hf_config.vocab_size
        trainer = trainer.model_copy(update={"compile": compiles_layers(hf_config, trainer, device, self.dtype)})
        dtype = self.dtype if world_size == 1 else self.accumulation_dtype
        # a model without memory needs no fake tensors, and a mesh of ranks cannot be made of them
        with unset_fake_temporarily():
            self.model = empty_model(hf_config, dtype, trainer, checkpointing)
            if world_size > 1:
                shard(self.model, self.model.layers, device, copies, self.dtype, trainer.cpu_offload)
        allocate(self.model, hf_config, device, trainer.cpu_offload and world_size > 1)
        self.master_weights = MasterWeights(self.model, self.dtype, world_size, trainer.cpu_offload)
        if random_weights:
            self.master_weights.randomize()
        else:
            load_weights(folder, self.master_weights.tensors, self.master_weights.parameters)
        self.master_weights.write_back()

    def to_device(self, micro: MicroBatch) -> DeviceBatch:
        """Copy a micro-batch to the policy's device."""
        return DeviceBatch.of(micro, self._device_settings)

    @torch.no_grad()
    def logprobs(self, micros: Sequence[DeviceBatch]) -> list[Tensor]:
        """[M] log-probabilities of each micro-batch's loss tokens, without gradients."""
        logprobs: list[Tensor] = [self.model(micro).logprob_M for micro in micros]
        reshard(self.model)
        return logprobs

    def weights(self, everywhere: bool = False) -> dict[str, Tensor] | None:
        """Copies of all weights under their Hugging Face names, in the model's type; every rank must call.

        Rank 0 has them in CPU memory and the other ranks get None; with `everywhere` every rank has them on its device.
        """
        parameters = self.master_weights.parameters
        whole = full_state_dict(parameters, self.dtype, self.device, self.rank, everywhere)
        return None if whole is None else split_experts(whole)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the weights, whole or not at all; every rank must call.

        Rank 0 writes. The other ranks return at once: a collective operation that waited for the disk would run into
        the deadline of collectives.
        """
        whole = self.weights()
        if whole is not None:
            write_folder(folder, self._folder, whole)
