"""vLLM's gpt-oss with another weight loader. vLLM's loader bypasses the loaders of the experts' and sinks' parameters.
In an update these parameters have no memory, so the new values are lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM


class GptOss(GptOssForCausalLM):  # type: ignore[misc]
    """Loads every tensor of an update with the loader of its parameter."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load tensors with their Hugging Face names. Returns the names of the parameters."""
        return super().load_weights(self._split(weights))  # type: ignore[no-any-return]

    def _split(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the experts one by one, so that vLLM calls their loaders. In an update, load the sinks here."""
        sinks = {name: each for name, each in self.named_parameters() if name.endswith(".attn.sinks")}
        for name, tensor in weights:
            layer, is_expert, part = name.partition(".mlp.experts.")
            if is_expert:
                yield from ((f"{layer}.mlp.experts.{number}.{part}", tensor[number]) for number in range(len(tensor)))
                continue
            sink: Any = sinks.get(name.replace(".self_attn.", ".attn."))
            if hasattr(sink, "weight_loader"):
                sink.weight_loader(sink, tensor.narrow(0, get_tensor_model_parallel_rank() * len(sink), len(sink)))
            yield name, tensor
