"""Filters that keep messages out of the log which vLLM writes although nothing is wrong."""

from __future__ import annotations

from logging import LogRecord

LOADS = "vllm.model_executor.models.utils"
RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
ANSWERS = "vllm.v1.engine.async_llm"
"""vLLM's loggers: of weights at their load, of layers at a reload, and of the engine core's answers."""


def not_of_rounding(record: LogRecord) -> bool:
    """False of weights in float32 for parameters of a shorter type, as where a model is stored in float32."""
    return not (isinstance(record.args, tuple) and "torch.float32" in map(str, record.args[1:2]))


def not_of_a_rotary_embedding(record: LogRecord) -> bool:
    """False of rotary embeddings, which have no weights to load."""
    return not str(record.args).endswith("RotaryEmbedding',)")


def not_of_the_head(record: LogRecord) -> bool:
    """False of the output head, which gets no weights where it is tied to the embedding."""
    return record.args != ("ParallelLMHead",)


def not_of_the_end(record: LogRecord) -> bool:
    """False of the end of the engine core's answers, after it was told to stop."""
    return "output_handler failed" not in record.getMessage()
