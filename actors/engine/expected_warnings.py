"""Harmless warnings of vLLM, by its loggers, and the filter that drops them."""

from __future__ import annotations

import logging

LOADS = "vllm.model_executor.models.utils"
ROUNDED = "with dtype torch.float32 into parameter"
"""A model folder may have float32 weights for an engine with a shorter type."""
RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
ROTARY = "RotaryEmbedding: Failed to load weights"
"""Rotary embeddings have no weights to load."""
TIED_HEAD = "ParallelLMHead: Failed to load weights"
"""An output head gets no weights if it is tied to the embedding."""
ANSWERS = "vllm.v1.engine.async_llm"
ENDED = "output_handler failed"
"""At the end of the engine no call waits for answers."""


def drop(logger: str, text: str) -> None:
    """Let a logger drop the messages that contain a text."""
    logging.getLogger(logger).addFilter(lambda record: text not in record.getMessage())
