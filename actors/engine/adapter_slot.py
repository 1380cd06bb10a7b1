"""The policy's adapter inside vLLM's worker: one slot, whose contents each publication replaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from actors.weights.adapter import ADAPTER_ID


class AdapterSlot:
    """Takes the place of the model where vLLM's weight transfer loads tensors."""

    def __init__(self, model: Any, rank: int, alpha: float) -> None:
        self._manager: Any = model.lora_manager
        self._helper = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._renames = None if mapper is None else mapper.get_rename_mapper()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter by tensors under PEFT's names.

        Raises:
            ValueError: the model has no such layers; the adapter before stays.
            Exception: vLLM failed while it filled the slot, which may hold a part of the adapter: the engine has to
                stay paused until another try or adapter has filled it.
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
        # vLLM would ignore unknown layers without a word, and answer as the base model.
        known = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
        if unknown := adapter.loras.keys() - known:
            raise ValueError(f"the model has no layer with an adapter at {min(unknown)}")
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
