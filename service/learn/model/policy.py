"""The policy on one rank: its shards of the model, their master weights, and frozen copies of earlier weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from service.config.learn import AlgorithmConfig
from service.errors import BatonError
from service.learn.compile import compiles_layers
from service.learn.device_batch import DeviceBatch, DeviceSettings
from service.learn.model.adapter_folder import Base, peft_names, read_adapter, write_adapter
from service.learn.model.attention import use_fastest_attention
from service.learn.model.hf_checkpoint import Names, load_weights, stored_names, write_folder
from service.learn.model.hf_config import read_config, unread_weights
from service.learn.model.logprob import accumulation_dtype
from service.learn.model.lora import adapter_off, add_adapter, begin_adapter
from service.learn.model.optimizer import MasterWeights, randomize
from service.learn.model.policy_model import Checkpointing, allocate, empty_model, stored_buffers
from service.learn.model.sharding import (
    WeightRows,
    full_state_dict,
    local_rows,
    local_shard,
    ranks_by_node,
    reshard,
    shard,
)
from service.learn.sequence_parallel import Slice
from service.learn.settings import LearnSettings
from service.types import MicroBatch


class OutOfMemory(BatonError):
    """Raised if a step ran out of the device's memory. `lighter`: the level of gradient checkpointing with which to
    continue; None if no level takes less memory."""

    def __init__(self, why: str, lighter: Checkpointing | None) -> None:
        super().__init__(why, lighter)
        self.lighter = lighter

    def __str__(self) -> str:
        return str(self.args[0])


class Policy:
    """The policy on one rank, loaded from a Hugging Face folder. Every rank calls the same methods in the same
    order."""

    def __init__(
        self,
        settings: LearnSettings,
        folder: Path,
        device: torch.device,
        rank: int,
        world_size: int,
        random_weights: bool = False,
        nodes: Sequence[str] | None = None,
        checkpointing: Checkpointing | None = None,
        sharded: bool = False,
    ) -> None:
        """`random_weights`: fill the weights with random numbers instead of reading them; `nodes`: the node of each
        rank, None if all ranks are on one node; `checkpointing`: replaces the trainer's settings of gradient
        checkpointing; `sharded`: shard also if there is only one rank."""
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.dtype: torch.dtype = getattr(torch, settings.model.dtype)
        self.accumulation_dtype = accumulation_dtype(self.dtype)
        self._folder = folder
        self.lora, self.adapter = settings.model.lora, settings.model.adapter
        trainer = settings.trainer
        self.sharded = world_size > 1 or sharded
        copies = [list(range(world_size))] if nodes is None or trainer.shard_within == "all" else ranks_by_node(nodes)
        self.n_copies, self.n_shards = len(copies), len(copies[0])
        """Number of complete copies of the policy among the ranks, and number of shards of each copy."""
        self.copy = next(number for number, ranks in enumerate(copies) if rank in ranks)
        self.shard = copies[self.copy].index(rank)
        """Index of this rank's shard in its copy."""
        self._hf_config = hf_config = read_config(folder)
        self.slice = Slice.of_rank(rank, world_size, trainer.sequence_parallel, device)
        self.batch_part, self.n_batch_parts = rank // self.slice.of, world_size // self.slice.of
        """Index of the part of each mini-batch that this rank's group trains, and number of parts."""
        self._device_settings = DeviceSettings(
            device,
            self.accumulation_dtype,
            trainer.layout,
            variable_length=device.type == "cuda" and self.dtype == torch.bfloat16,
            part=self.slice,
        )
        use_fastest_attention(device)
        self.vocab_size: int = hf_config.vocab_size
        self.compiles = compiles_layers(trainer, device, self.dtype)
        """Whether layers are compiled, which happens in the first steps."""
        trainer = trainer.model_copy(update={"compile": self.compiles})
        self.checkpointing = checkpointing or Checkpointing.of(trainer, hf_config.num_hidden_layers)
        dtype = self.accumulation_dtype if self.sharded else self.dtype
        # the frozen base of an adapter is stored in the compute type
        self.model = empty_model(hf_config, dtype if self.lora is None else self.dtype, trainer, self.checkpointing)
        if self.lora is not None:
            add_adapter(self.model, self.model.layers, self.lora, dtype)
        if self.sharded:
            units = self.model.units(self.checkpointing.regather)
            shard(self.model, units, device, copies, self.dtype, trainer.cpu_offload)
        allocate(self.model, hf_config, device, trainer.cpu_offload and self.sharded)
        self.master_weights = MasterWeights(self.model, self.dtype, self.sharded, trainer.cpu_offload)
        self._fill(settings, random_weights)

    @torch.no_grad()
    def _fill(self, settings: LearnSettings, random_weights: bool) -> None:
        """Fill all weights: random ones, or those on disk; an adapter without a file on disk starts without effect."""
        masters, trained = self.master_weights.tensors, self.master_weights.parameters
        whole = dict(self.model.named_parameters()) | stored_buffers(self.model)
        base = {name: weight for name, weight in whole.items() if self.lora is None or name not in trained}
        shards = {name: masters.get(name, local_shard(parameter.detach())) for name, parameter in base.items()}
        if random_weights:
            randomize(shards.values())
        else:
            load_weights(self._folder, shards, base, unread_weights(self._hf_config))
        if settings.model.adapter is not None and self.base is not None and not random_weights:
            read_adapter(settings.model.adapter, self.base, masters, trained)
        elif self.lora is not None:
            begin_adapter(masters, trained, settings.seed)
        self.master_weights.write_back()

    @contextmanager
    def gradients_dropped_on_error(self) -> Iterator[None]:
        """Within the block, an error drops all gradients, so that they do not reach the next optimizer step.

        Raises:
            OutOfMemory: the device had too little memory.
        """
        try:
            yield
        except BaseException as error:  # also on cancellation: partial gradients must not reach a step
            self.master_weights.drop_gradients()
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            n_layers = len(self.model.layers)
            lighter = self.checkpointing.lighter(n_layers, self.compiles)
            held = f"{self.checkpointing.layers} of {n_layers} layers kept their input only"
            better = f" ({lighter.layers} would take less)" if lighter is not None else ""
            first = str(error).partition("\n")[0]
            raise OutOfMemory(f"rank {self.rank} was out of memory, {held}{better}: {first}", lighter) from error

    def keep_gathered_weights(self) -> None:
        """Keep the gathered weights of layers for the backward pass, which takes more memory and sends fewer bytes."""
        self.checkpointing = self.checkpointing._replace(regather=False)
        for layer in self.model.layers:
            if isinstance(layer, FSDPModule):
                layer.set_reshard_after_forward(False, recurse=False)

    @cached_property
    def base(self) -> Base | None:
        """The base model of the adapter; None if all weights are trained."""
        return None if self.lora is None else Base.of(self._folder)

    @cached_property
    def _names(self) -> Names:
        """The names that the engines use for the weights, because they load the same folder."""
        return stored_names(self._folder)

    @property
    def alpha(self) -> float | None:
        """`model.lora.alpha` of the adapter; None if all weights are trained."""
        return None if self.lora is None else self.lora.alpha

    def to_device(self, micro: MicroBatch) -> DeviceBatch:
        """Copy a micro-batch to the policy's device."""
        return DeviceBatch.of(micro, self._device_settings)

    @torch.no_grad()
    def logprobs(self, micros: Sequence[DeviceBatch]) -> list[Tensor]:
        """For each micro-batch, [M] the log-probabilities of its loss tokens, without gradients."""
        logprobs: list[Tensor] = [self.model(micro).logprob_M for micro in micros]
        reshard(self.model)
        return logprobs

    def weights(self, everywhere: bool = False) -> dict[str, Tensor] | None:
        """Copies of the trained weights in the model's data type; every rank must call this. These are all weights
        under their Hugging Face names or, if an adapter is trained, the adapter's tensors under PEFT's names, with B
        not multiplied by alpha / rank.

        Rank 0 gets the copies in CPU memory, and the other ranks get None. With `everywhere`, every rank gets the
        copies on its device.
        """
        parameters = self.master_weights.parameters
        whole = full_state_dict(parameters, self.dtype, self.device, self.rank, everywhere)
        if whole is None:
            return None
        return self._names.split(whole) if self.lora is None else peft_names(whole, self._names)

    def shards(self) -> dict[str, WeightRows]:
        """This rank's rows of each trained weight, under the names that `weights` uses. The rows are not copied, and
        keep the data type of the parameters."""
        rows = local_rows(self.master_weights.parameters)
        return self._names.split_rows(rows) if self.lora is None else peft_names(rows, self._names)

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, or the adapter as a PEFT folder in float32; every rank must call
        this.

        Rank 0 writes. The other ranks return at once: if they waited for the disk in a collective, the collective could
        exceed its deadline.
        """
        if self.lora is None:
            whole = self.weights()
            if whole is not None:
                write_folder(folder, self._folder, whole)
        elif self.base is not None:
            masters = self.master_weights.parameters if self.sharded else self.master_weights.tensors
            adapter = full_state_dict(masters, self.accumulation_dtype, self.device, self.rank)
            if adapter is not None:
                write_adapter(folder, self.base, self.lora, adapter)


class FrozenWeights:
    """Copies of the policy at an earlier step, by kind: `proximal` for the proximal anchor, `reference` for the KL
    term. Only the kinds that the configuration needs are copied.

    Each rank copies its shard of the master weights (float32, on the device or in CPU memory). For a forward pass the
    copy is swapped with the trained weights and afterwards swapped back, so no second model is needed. If an adapter is
    trained, only the adapter is copied. The KL reference is then the base model without the adapter, unless training
    starts with an adapter (`model.adapter`), or the reference is renewed (`algorithm.reference.refresh_every`).
    """

    def __init__(self, algorithm: AlgorithmConfig, policy: Policy) -> None:
        self._policy = policy
        self._on_cpu = algorithm.reference.on_cpu
        self._refresh_every: dict[str, int] = {}
        """Optimizer steps after which each kind of copy is renewed; 0: never. A proximal anchor that would be renewed
        at every step is the current policy, and needs no copy."""
        if algorithm.anchor == "proximal" and algorithm.anchor_every > 1:
            self._refresh_every["proximal"] = algorithm.anchor_every
        is_new = policy.lora is not None and policy.adapter is None
        self._reference_is_base = is_new and not algorithm.reference.refresh_every
        if algorithm.kl_coef > 0:
            self._refresh_every["reference"] = algorithm.reference.refresh_every
        self.copies: dict[str, dict[str, Tensor]] = {}
        """The copied tensors, by kind and by name of the weight."""
        self.taken_at: dict[str, int] = {}
        """Number of optimizer steps of the policy when the copy was made, by kind."""

    def logprobs(self, kind: str, micros: Sequence[DeviceBatch], step: int) -> list[Tensor] | list[None]:
        """For each micro-batch, [M] the log-probabilities of its loss tokens under the frozen weights; None for each
        micro-batch if they are not needed."""
        if kind not in self._refresh_every:
            return [None] * len(micros)
        if kind == "reference" and self._reference_is_base:
            with adapter_off(self._policy.model):
                return self._policy.logprobs(micros)
        every = self._refresh_every[kind]
        if kind not in self.copies or (every and step - self.taken_at[kind] >= every):
            self.take(kind, step)
        self._exchange(kind)
        try:
            return self._policy.logprobs(micros)
        finally:
            self._exchange(kind)

    @torch.no_grad()
    def take(self, kind: str, step: int) -> None:
        """Copy the current weights as frozen weights; `step`: the number of optimizer steps taken so far."""
        self.taken_at[kind] = step
        masters = self._policy.master_weights.tensors
        if kind not in self.copies:
            self.copies[kind] = {
                name: master.to("cpu" if self._on_cpu else master.device, copy=True) for name, master in masters.items()
            }
            return
        for name, master in masters.items():
            self.copies[kind][name].copy_(master)

    @torch.no_grad()
    def _exchange(self, kind: str) -> None:
        copies = self.copies[kind]
        for name, master in self._policy.master_weights.tensors.items():
            kept = master.clone()
            master.copy_(copies[name])
            copies[name].copy_(kept)
        self._policy.master_weights.write_back()
