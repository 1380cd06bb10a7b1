"""The log has no false alarms of vLLM's, and keeps every other warning."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.engine.expected_warnings import (
    ANSWERS,
    LOADS,
    RELOADS,
    expect_layers_without_weights,
    expect_rounding,
    expect_the_end,
)

NOTHING_LOADED = "%s: Failed to load weights"
OTHER_TYPE = "Attempted to load weight %s with dtype %s into parameter with dtype %s"
NO_ANSWER = "AsyncLLM output_handler failed."
VLLM = find_spec("vllm")


@pytest.fixture(autouse=True)
def only_these_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ANSWERS, LOADS, RELOADS):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])


@pytest.mark.parametrize("tied", [True, False])
def test_only_layers_that_have_no_weights_are_expected_to_get_none(
    tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layers = ["YaRNScalingRotaryEmbedding", "RotaryEmbedding", "ParallelLMHead", "QKVParallelLinear"]
    logger = logging.getLogger(RELOADS)
    with expect_layers_without_weights(tied):
        for layer in layers:
            logger.warning(NOTHING_LOADED, layer)
    assert [record.args for record in caplog.records] == [(layer,) for layer in layers[2 + tied :]]
    caplog.clear()
    logger.warning(NOTHING_LOADED, "RotaryEmbedding")
    assert len(caplog.records) == 1, "outside of a reload nothing is expected"


def test_only_weights_in_float32_are_expected_to_be_rounded(caplog: pytest.LogCaptureFixture) -> None:
    expect_rounding()
    for stored, held in (("torch.float32", "torch.bfloat16"), ("torch.bfloat16", "torch.float8_e4m3fn")):
        logging.getLogger(LOADS).warning(OTHER_TYPE, "model.norm.weight", stored, held)
    logging.getLogger(LOADS).warning("something else")
    kept = [record.getMessage() for record in caplog.records]
    assert len(kept) == 2 and kept[0].endswith("torch.float8_e4m3fn") and kept[1] == "something else"


def test_an_engine_that_is_being_stopped_may_fall_silent(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger(ANSWERS).error(NO_ANSWER)
    expect_the_end()
    logging.getLogger(ANSWERS).error(NO_ANSWER)
    logging.getLogger(ANSWERS).error("another error")
    assert [record.getMessage() for record in caplog.records] == [NO_ANSWER, "another error"]


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")
@pytest.mark.parametrize(("logger", "message"), [(RELOADS, NOTHING_LOADED), (LOADS, OTHER_TYPE), (ANSWERS, NO_ANSWER)])
def test_the_messages_are_those_of_the_installed_vllm(logger: str, message: str) -> None:
    assert VLLM is not None and VLLM.origin is not None
    file = Path(VLLM.origin).parents[1].joinpath(*logger.split(".")).with_suffix(".py")
    written = "".join(part.strip().strip('"') for part in file.read_text().splitlines())
    assert message in written
