"""Keeps messages out of the log that vLLM writes although nothing is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOADS = "vllm.model_executor.models.utils"
RELOADS = "vllm.model_executor.model_loader.reload.layerwise"
ANSWERS = "vllm.v1.engine.async_llm"
"""vLLM's loggers: of weights at their load, of layers at a reload, and of the engine core's answers."""


def expect_rounding() -> None:
    """Expect weights in float32 for parameters of a shorter type, as where a model is stored in float32."""
    logging.getLogger(LOADS).addFilter(lambda record: "torch.float32" not in _arguments(record)[1:2])


@contextmanager
def expect_layers_without_weights(tied: bool) -> Iterator[None]:
    """Within the block, expect layers that get nothing at a reload: rotary embeddings, and the head where `tied`."""

    def is_unexpected(record: logging.LogRecord) -> bool:
        (layer, *_) = (*_arguments(record), "")
        return not (layer.endswith("RotaryEmbedding") or (tied and layer == "ParallelLMHead"))

    logger = logging.getLogger(RELOADS)
    logger.addFilter(is_unexpected)
    try:
        yield
    finally:
        logger.removeFilter(is_unexpected)


def expect_the_end() -> None:
    """Expect that the engine core gives no more answers, because it is being stopped."""
    logging.getLogger(ANSWERS).addFilter(lambda record: "output_handler failed" not in record.getMessage())


def _arguments(record: logging.LogRecord) -> list[str]:
    return [str(argument) for argument in record.args] if isinstance(record.args, tuple) else []
