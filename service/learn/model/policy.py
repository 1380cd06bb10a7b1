"""The policy on one rank: its shards of the model, and the master weights behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from service.config.tree import Config
from service.learn.device_batch import DeviceBatch
from service.learn.model.experts import as_on_disk
from service.learn.model.full_state_dict import gather_everywhere, gather_whole
from service.learn.model.hf_checkpoint import load_weights, write_folder
from service.learn.model.logprob import accumulation_dtype
from service.learn.model.master_weights import Masters
from service.learn.model.model import allocate, empty_model, read_config
from service.learn.model.sharding import forget_gathered, shard


class Policy:
    """A model from a Hugging Face folder; every rank calls the same methods in the same order."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        device: torch.device,
        rank: int,
        world: int,
        random_weights: bool = False,
    ) -> None:
        """`random_weights`: draw them instead of reading them, where only the model's shape matters."""
        self.device = device
        self.rank = rank
        self.world = world
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.accumulation_dtype = accumulation_dtype(self.dtype)
        self._folder = folder
        trainer = config.trainer
        hf_config = read_config(folder)
        self.vocab_size: int = hf_config.vocab_size
        held = self.dtype if world == 1 else self.accumulation_dtype
        self.model = empty_model(hf_config, held, trainer)
        if world > 1:
            shard(self.model, device, world, self.dtype, trainer.cpu_offload)
        allocate(self.model, hf_config, device, trainer.cpu_offload and world > 1)
        self.masters = Masters(self.model, self.dtype, world, trainer.cpu_offload)
        if random_weights:
            self.masters.draw()
        else:
            load_weights(folder, self.masters.tensors, self.masters.parameters)
        self.masters.write_back()

    @torch.no_grad()
    def logprobs(self, placed: Sequence[DeviceBatch]) -> list[Tensor]:
        """[M] log-probabilities of each micro-batch's loss tokens, without gradients."""
        logprobs = [self.model(micro)[0] for micro in placed]
        forget_gathered(self.model)
        return logprobs

    def weights(self) -> dict[str, Tensor] | None:
        """All weights under their Hugging Face names, on the CPU, in the model's type; None on ranks other than 0."""
        whole = gather_whole(self.masters.parameters, self.dtype, self.device, self.rank, self.world)
        return None if whole is None else as_on_disk(whole)

    def weights_on_device(self) -> dict[str, Tensor]:
        """The same on every rank's own device."""
        return as_on_disk(gather_everywhere(self.masters.parameters, self.dtype, self.device, self.world))

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with the weights, whole or not at all."""
        whole = self.weights()
        if whole is not None:
            write_folder(folder, self._folder, whole)
        if self.world > 1:
            dist.barrier()
