"""Engine and trainer give the newest policy's tokens the same log-probabilities, or the run ends with the reason."""

import numpy as np
import pytest

from service.config import Config, WeightsConfig, check
from service.errors import ConfigError
from service.observe.logprob_mismatch import FRESH_KL, logprob_mismatch

VERIFY = WeightsConfig(verify=True, verify_tolerance=1e-3)


def divergence(difference: float) -> float:
    """What the trainer reports when every log-probability is off by this much, up or down."""
    log_ratio = np.array([difference, -difference])
    return float(np.mean(np.exp(log_ratio) - 1 - log_ratio))


def test_differences_within_the_tolerance_pass() -> None:
    assert logprob_mismatch({FRESH_KL: divergence(9e-4)}, VERIFY) is None


def test_differences_beyond_the_tolerance_are_said_in_nats() -> None:
    why = logprob_mismatch({FRESH_KL: divergence(0.02)}, VERIFY)
    assert why is not None and "0.02 nats" in why


def test_a_difference_beyond_the_tolerance_or_not_a_number_is_a_mismatch() -> None:
    assert logprob_mismatch({FRESH_KL: divergence(1.1e-3)}, VERIFY) is not None
    assert logprob_mismatch({FRESH_KL: float("nan")}, VERIFY) is not None


def test_rounding_below_zero_is_no_mismatch() -> None:
    assert logprob_mismatch({FRESH_KL: -1e-9}, VERIFY) is None


def test_nothing_is_said_without_fresh_tokens_or_without_being_asked() -> None:
    assert logprob_mismatch({}, VERIFY) is None
    assert logprob_mismatch({FRESH_KL: 1.0}, WeightsConfig()) is None


def test_a_kept_kv_cache_cannot_be_verified() -> None:
    config = Config(weights=WeightsConfig(verify=True, kv_cache="keep"))
    with pytest.raises(ConfigError, match=r"weights\.verify: .*recompute"):
        check(config)
