"""The log has no false alarms of vLLM's, and keeps every other warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.engine.expected_warnings import (
    ANSWERS,
    LOADS,
    RELOADS,
    not_of_a_rotary_embedding,
    not_of_rounding,
    not_of_the_end,
    not_of_the_head,
)

NOTHING_LOADED = "%s: Failed to load weights"
OTHER_TYPE = "Attempted to load weight %s with dtype %s into parameter with dtype %s"
NO_ANSWER = "AsyncLLM output_handler failed."
VLLM = find_spec("vllm")


@pytest.fixture(autouse=True)
def only_these_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ANSWERS, LOADS, RELOADS):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])


@pytest.mark.parametrize(
    ("logger", "expected", "message", "left_out", "kept"),
    [
        (
            LOADS,
            not_of_rounding,
            OTHER_TYPE,
            ("w", "torch.float32", "torch.bfloat16"),
            ("w", "torch.bfloat16", "torch.float8"),
        ),
        (RELOADS, not_of_a_rotary_embedding, NOTHING_LOADED, ("YaRNScalingRotaryEmbedding",), ("ParallelLMHead",)),
        (RELOADS, not_of_the_head, NOTHING_LOADED, ("ParallelLMHead",), ("QKVParallelLinear",)),
        (ANSWERS, not_of_the_end, NO_ANSWER, (), None),
    ],
)
def test_what_is_expected_is_left_out_and_every_other_message_kept(
    logger: str,
    expected: Callable[[logging.LogRecord], bool],
    message: str,
    left_out: tuple[str, ...],
    kept: tuple[str, ...] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger(logger)
    log.warning(message, *left_out)
    log.addFilter(expected)
    log.warning(message, *left_out)
    if kept is not None:
        log.warning(message, *kept)
    log.error("something else")
    assert len(caplog.records) == 2 + (kept is not None)


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
@pytest.mark.parametrize(("logger", "message"), [(RELOADS, NOTHING_LOADED), (LOADS, OTHER_TYPE), (ANSWERS, NO_ANSWER)])
def test_the_messages_are_those_of_the_installed_vllm(logger: str, message: str) -> None:
    assert VLLM is not None and VLLM.origin is not None
    file = Path(VLLM.origin).parents[1].joinpath(*logger.split(".")).with_suffix(".py")
    written = "".join(part.strip().strip('"') for part in file.read_text().splitlines())
    assert message in written
