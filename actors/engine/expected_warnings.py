"""Log filters for vLLM's harmless warnings: each function returns False for one warning, which drops it."""

from __future__ import annotations

from logging import LogRecord

LOADS = "vllm.model_executor.models.utils"
RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
ANSWERS = "vllm.v1.engine.async_llm"
"""Names of vLLM's loggers: `LOADS` for loading weights, `RELOADS` for reloading layers, `ANSWERS` for answers of the
engine core."""


def not_of_rounding(record: LogRecord) -> bool:
    """Return False for the warning that float32 weights are loaded into parameters of a shorter type; a model folder
    may have float32 weights."""
    return not (isinstance(record.args, tuple) and "torch.float32" in map(str, record.args[1:2]))


def not_of_a_rotary_embedding(record: LogRecord) -> bool:
    """Return False for the warning about rotary embeddings, which have no weights to load."""
    return not str(record.args).endswith("RotaryEmbedding',)")


def not_of_the_head(record: LogRecord) -> bool:
    """Return False for the warning about the output head, which gets no weights if it is tied to the embedding."""
    return record.args != ("ParallelLMHead",)


def not_of_the_end(record: LogRecord) -> bool:
    """Return False for the warning that the engine core gives no more answers, which vLLM logs after Baton has stopped
    the core."""
    return "output_handler failed" not in record.getMessage()
