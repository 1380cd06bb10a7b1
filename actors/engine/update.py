"""What a paused engine is asked so that its workers load an update: the whole model, or the adapter alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.weights.adapter import ADAPTER, ADAPTER_ID
from actors.weights.checksum import PolicySize
from service.config import LoraConfig
from service.errors import RunFailed
from service.types import PolicyVersion

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM


async def start_adapter(llm: AsyncLLM, lora: LoraConfig, size: PolicySize) -> LoRARequest:
    """Load an adapter that changes nothing; returns how requests name it and those that take its place.

    Raises:
        RunFailed: the engine's model takes no such adapter.
    """
    from vllm.lora.request import LoRARequest

    arguments = {"shapes": size.adapter, "rank": lora.rank, "alpha": lora.alpha}
    try:
        await llm.collective_rpc("start_adapter", kwargs=arguments)
    except Exception as error:  # vLLM passes the worker's error on as a bare Exception
        raise RunFailed(f"the engine cannot take an adapter as in model.lora: {error}") from error
    return LoRARequest(ADAPTER, ADAPTER_ID, "never read, because the adapter is loaded")


async def load(llm: AsyncLLM, info: dict[str, Any], version: PolicyVersion, tries: int, adapter: bool) -> int:
    """Load the weights, or the adapter, into the paused engine; returns the number of tries.

    Raises:
        RunFailed: every try failed; the engine holds parts of both versions and must not resume.
    """
    for tried in range(1, tries + 1):
        try:
            await (_load_adapter if adapter else _load_weights)(llm, info)
            break
        except Exception as error:  # vLLM passes the worker's error on as a bare Exception
            if tried == tries:
                raise RunFailed(f"the weights of version {version} were not loaded in {tries} tries") from error
    return tried


async def _load_weights(llm: AsyncLLM, info: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=info))
    await llm.finish_weight_update()


async def _load_adapter(llm: AsyncLLM, info: dict[str, Any]) -> None:
    await llm.collective_rpc("update_adapter", kwargs={"update_info": info})
