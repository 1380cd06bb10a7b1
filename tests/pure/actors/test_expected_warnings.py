"""The log has no false alarms of vLLM's, and keeps every other warning."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.engine.expected_warnings import ANSWERS, ENDED, LOADS, RELOADS, ROTARY, ROUNDED, TIED_HEAD, drop

VLLM = find_spec("vllm")


@pytest.mark.parametrize(
    ("logger", "text", "message", "dropped", "kept"),
    [
        (
            LOADS,
            ROUNDED,
            "Attempted to load weight %s with dtype %s into parameter with dtype %s",
            ("w", "torch.float32", "torch.bfloat16"),
            ("w", "torch.bfloat16", "torch.float8"),
        ),
        (RELOADS, ROTARY, "%s: Failed to load weights", ("YaRNScalingRotaryEmbedding",), ("ParallelLMHead",)),
        (RELOADS, TIED_HEAD, "%s: Failed to load weights", ("ParallelLMHead",), ("QKVParallelLinear",)),
        (ANSWERS, ENDED, "AsyncLLM output_handler %s.", ("failed",), ("began",)),
    ],
)
def test_what_is_expected_is_left_out_and_every_other_message_kept(
    logger: str,
    text: str,
    message: str,
    dropped: tuple[str, ...],
    kept: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = logging.getLogger(logger)
    monkeypatch.setattr(log, "filters", [])
    drop(logger, text)
    log.warning(message, *dropped)
    log.warning(message, *kept)
    assert [record.args for record in caplog.records] == [kept]
    if VLLM is not None and VLLM.origin is not None:  # the messages are those of the installed vLLM
        file = Path(VLLM.origin).parents[1].joinpath(*logger.split(".")).with_suffix(".py")
        written = "".join(part.strip().strip('"') for part in file.read_text().splitlines())
        assert message % dropped in written if logger == ANSWERS else message in written
