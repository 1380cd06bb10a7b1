"""Code that runs inside vLLM's worker process: it loads weights or an adapter, repacks them for CPUs, and ends the
worker if its owner has died.

vLLM imports this module before it loads the model (`worker_extension_cls`). So the import itself prepares the process:
AMX permission, adapters on CPU, the watch over the owner, the weight transfer backends, and filters of the log.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import ModelRegistry
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.platforms import current_platform

from actors.engine import text_models
from actors.engine.cpu_lora import use_runs_of_rows
from actors.engine.expected_warnings import LOADS, RELOADS, ROTARY, ROUNDED, TIED_HEAD, drop
from actors.engine.loader_calls import LoaderCalls
from actors.engine.vllm_arguments import OWNER_PID, PULL_BACKEND
from actors.weights.cuda_ipc import IPC_BACKEND, Handle, rebuild_arguments
from actors.weights.memory import OpenMemory
from actors.weights.policy_tensors import ADAPTER_ID, AdapterShapes, TensorSpec
from actors.weights.pulled import WeightFile, file_of

log = logging.getLogger(__name__)


def allow_amx() -> None:
    """Ask the kernel for AMX tiles. (vLLM's CPU attention does not ask if the first batch has at most 4 tokens.)"""
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def end_with_owner() -> None:
    """Kill this process as soon as its owner, the process that started the engine, has ended. If vLLM's engine core is
    this process's parent, kill the core too."""
    owner = int(os.environ.get(OWNER_PID, "0"))
    if owner in (0, os.getpid()):
        return
    parent = os.getppid()
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    # If this process is separate, its parent is the engine core, which does not watch the owner either.
    core = parent if parent not in (owner, 1) else None
    threading.Thread(target=_wait_and_end, args=(owner_fd, core), daemon=True, name="owner-watch").start()


def _wait_and_end(owner_fd: int, core: int | None) -> None:
    poll = select.poll()
    poll.register(owner_fd, select.POLLIN)
    poll.poll()
    if core is not None and os.getppid() == core:
        os.kill(core, signal.SIGKILL)
    WorkerExtension.unlink_shared_memory()
    os._exit(1)


def repack_for_cpu(model: torch.nn.Module) -> None:
    """Repack the weights for vLLM's CPU kernels, after a reload has written unpacked weights.

    vLLM 0.32 does not repack an output head that is tied to the embedding, or the experts of an MoE model. It would
    compute with their old packed copies, without an error.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)


def abandon_reload(model: torch.nn.Module) -> None:
    """Restore the tensors of each layer that a failed update left unfinished. Otherwise vLLM would count values from
    the failed update as values of the next update."""
    for layer in model.modules():
        if (info := get_layerwise_info(layer)).kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()


def second_names(model: torch.nn.Module) -> set[str]:
    """Return the second names of parameters that have two names. A tied head is not published beside its embedding; but
    vLLM treats head and embedding as untied if the model's folder stores the head."""
    return set(dict(model.named_parameters(remove_duplicate=False))) - set(dict(model.named_parameters()))


def without_values(model: torch.nn.Module) -> list[str]:
    """Return the parameters for which the current update called no loader. They would keep their old values, or have no
    values."""
    found = list[str]()
    for path, layer in model.named_modules():
        if (info := get_layerwise_info(layer)).can_load():
            called = SKIP_LOAD_TENSORS.union(name for name, _ in info.loaded_weights)
            found += [f"{path}.{name}" for name, _ in layer.named_parameters(recurse=False) if name not in called]
    return found


@dataclass
class PullInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version of the weights, and the sources of their parts; see `actors.weights.pulled.WeightFile.info`."""

    version: int
    sources: list[Any]


class PullingEngine(WeightTransferEngine[Any, Any]):  # type: ignore[misc]
    """Reads this worker's part of each parameter from the memory of the ranks, or from the image of this node. The
    model is reloaded layer by layer, with vLLM's own sharding and layout."""

    update_info_cls = PullInfo
    _file: WeightFile
    _kept: ClassVar[dict[str, OpenMemory]] = {}
    """The ranks' memory, which stays open between updates. (A worker has one engine of this class.)"""
    _made: LoaderCalls
    _calls: LoaderCalls | None = None
    """The calls of the last update, if it succeeded."""
    unread: Sequence[str] = ()
    """The published tensors that the update has not read; empty if the update repeats calls."""

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: this transfer needs no set-up."""

    def start_weight_update(self) -> None:
        """Give the layers the layout of a checkpoint again, so that weights can be loaded."""
        initialize_layerwise_reload(self.model)
        self._made = LoaderCalls(self.model)

    def receive_weights(self, update_info: PullInfo) -> None:
        """Load every parameter from the sources of `update_info`. Some layers read their parameters only in
        `finish_weight_update`.

        Raises:
            WeightsGone: weights were replaced while they were read.
        """
        self._file = file_of(vars(update_info), self._kept)
        calls, self._calls = self._calls, None
        if calls is not None and calls.header == self._file.header:
            calls.repeat(self._file)
            self._made = calls
        else:
            self.model.load_weights(self._file.tensors())
        self._check()

    def finish_weight_update(self) -> None:
        """Convert the loaded layers to the layout of vLLM's kernels again.

        Raises:
            WeightsGone: weights were replaced while they were read.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        repack_for_cpu(self.model)
        self._check()
        self.unread = () if self._made.header else self._file.unread()
        if not self._made.header:
            self._made.finish(self._file)
        self._calls = self._made

    def _check(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._file.check()

    def shutdown(self) -> None:
        """Do nothing: the memory is freed with the process."""


@dataclass
class IpcUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The data with which a worker opens all parameters in another process's memory on the same GPU. The parameters
    have their Hugging Face names."""

    tensors: list[TensorSpec]
    gpu: str
    handles: list[Handle]


class IpcWeightEngine(IPCWeightTransferEngine):  # type: ignore[misc]
    """vLLM's own transfer engine for CUDA IPC, with handles that are sent as JSON instead of a pickle."""

    update_info_cls = IpcUpdateInfo

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Load every parameter from the memory to which the handles of `update_info` refer."""
        names, dtypes, shapes = map(list, zip(*update_info.tensors, strict=True))
        specs = zip(update_info.tensors, update_info.handles, strict=True)
        handles = [{update_info.gpu: rebuild_arguments(handle, TensorSpec(*spec))} for spec, handle in specs]
        super().receive_weights(IPCWeightTransferUpdateInfo(names, dtypes, shapes, ipc_handles=handles))


class AdapterSlot:
    """The slot of the policy's adapter. vLLM's weight transfer loads tensors into it instead of into the model."""

    def __init__(self, model: Any, rank: int, alpha: float) -> None:
        self._manager: Any = model.lora_manager
        self._helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._renames = None if mapper is None else mapper.get_rename_mapper()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter by tensors with PEFT's names.

        Raises:
            ValueError: the model has no such layers. The previous adapter stays. Exception: vLLM failed while it filled
            the slot. The slot may hold a part of the adapter, so the engine must stay paused until a later try has
            filled it.
        """
        manager = self._manager
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {name: tensor.clone() for name, tensor in weights},  # vLLM multiplies alpha / rank into B in place
            self._helper,
            device=manager.device,
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=self._renames,
        )
        # vLLM would ignore unknown layers without a message, and serve the base model.
        known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        if unknown := adapter.loras.keys() - known:
            raise ValueError(f"the model has no layer with an adapter at {min(unknown)}")
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)


class WorkerExtension:
    """Methods that the engine calls in addition to the methods of vLLM's worker; vLLM mixes this class into its
    worker."""

    _slot: AdapterSlot | None = None

    def start_adapter(self: Any, shapes: AdapterShapes, rank: int, alpha: float) -> str:
        """Create the slot of the policy's adapter, and fill it with an adapter that changes nothing. (A request with a
        missing adapter would end the engine core.) Returns an empty text, or why this failed."""
        try:
            self._slot = AdapterSlot(self.get_model(), rank, alpha)
            self._slot.load_weights((name, torch.zeros(shape)) for name, shape in shapes.items())
            return ""
        except Exception as error:
            log.exception("the adapter was not started")
            return f"{type(error).__name__}: {error}"

    @staticmethod
    def unlink_shared_memory() -> None:
        """Remove the names of the memory that the engine's processes share. They have all opened it, so it is freed
        when the last of them ends, in whatever way."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.rpartition(" ")[2]
            if path.startswith(("/dev/shm/psm_", "/dev/shm/vllm_dist_")):
                Path(path).unlink(missing_ok=True)

    def load_update(self: Any, update_info: dict[str, Any]) -> tuple[str, Sequence[str]]:
        """Load the weights, or the adapter, that the weight transfer backend receives.

        Returns an error message (empty if the weights are loaded), and the tensors that the worker has not read. After
        a failure the worker may have parts of two versions; it accepts another update. It does not raise: vLLM would
        raise at the first failed worker, and read the other workers' answers as answers to the next call.
        """
        engine: Any = self.weight_transfer_engine
        try:
            if self._slot is not None:
                # Not as a weight update of vLLM: this would remove all adapters at its end.
                engine.set_weight_update_target(self._slot, engine.model_config)
                engine.update_weights(update_info)
                return "", ()
            tied = second_names(engine.model)
            self.start_weight_update()
            self.update_weights(update_info)
            missed = [name for name in without_values(engine.model) if name not in tied]
            if missed and engine.model_config.quantization is None:  # a layer that quantises has other parameters
                raise ValueError(f"nothing was loaded into {len(missed)} parameters of the engine, as {missed[0]}")
            self.finish_weight_update()
            return "", getattr(engine, "unread", ())
        except Exception as error:
            log.exception("the update failed")
            self._weight_update_active = False
            abandon_reload(self.get_model())
            return f"{type(error).__name__}: {error}", ()
        finally:
            engine.reset_weight_update_target()


allow_amx()
if current_platform.is_cpu():
    use_runs_of_rows()
    text_models.register()
ModelRegistry.register_model("GptOssForCausalLM", "actors.engine.gpt_oss:GptOss")
end_with_owner()
drop(LOADS, ROUNDED)
drop(RELOADS, ROTARY)
drop(RELOADS, TIED_HEAD)
WeightTransferEngineFactory.register_engine(PULL_BACKEND, PullingEngine)
WeightTransferEngineFactory.register_engine(IPC_BACKEND, IpcWeightEngine)
