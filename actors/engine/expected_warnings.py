"""Log filters that drop vLLM's harmless warnings."""

from __future__ import annotations

from logging import LogRecord

LOADS = "vllm.model_executor.models.utils"
RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
ANSWERS = "vllm.v1.engine.async_llm"
"""vLLM's loggers for loading weights, for reloading layers, and for answers of the engine core."""


def not_of_rounding(record: LogRecord) -> bool:
    """Drop the warning about float32 weights for parameters of a shorter type, as in a folder stored in float32."""
    return not (isinstance(record.args, tuple) and "torch.float32" in map(str, record.args[1:2]))


def not_of_a_rotary_embedding(record: LogRecord) -> bool:
    """Drop the warning about rotary embeddings, which have no weights to load."""
    return not str(record.args).endswith("RotaryEmbedding',)")


def not_of_the_head(record: LogRecord) -> bool:
    """Drop the warning about the output head, which gets no weights if it is tied to the embedding."""
    return record.args != ("ParallelLMHead",)


def not_of_the_end(record: LogRecord) -> bool:
    """Drop the warning that the engine core's answers end, which comes after Baton has stopped the core."""
    return "output_handler failed" not in record.getMessage()
