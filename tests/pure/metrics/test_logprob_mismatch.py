"""Engine and trainer give the newest policy's tokens the same log-probabilities, or the run ends with the reason."""

import pytest
import torch

from service.config import Config, WeightsConfig, check
from service.errors import ConfigError
from service.learn.losses.step_metrics import RatioMetrics, Sums
from service.observe.not_learning import FRESH, LARGEST_FRACTION, MIN_TOKENS, STEPS_IN_A_ROW, LogprobCheck

VERIFY = WeightsConfig(verify=True)


def measured(differences: list[float]) -> dict[str, float]:
    """The metrics of fresh tokens whose two log-probabilities differ by these nats."""
    log_ratio_M = torch.tensor(differences, dtype=torch.float64)
    sums, none_M = Sums(torch.device("cpu"), 1), torch.zeros(len(differences), dtype=torch.int64)
    RatioMetrics(torch.device("cpu"), 0.1).add(sums, log_ratio_M, none_M.bool(), none_M)
    totals = sums.totals()
    tokens = totals["tokens/0"]
    return {
        f"{FRESH}/tokens": tokens,
        f"{FRESH}/kl": totals["kl/0"] / tokens,
        f"{FRESH}/differing_fraction": totals["differing/0"] / tokens,
    }


AGREE, DIFFER = measured([0.03, -0.05] * MIN_TOKENS), measured([0.2, -0.3] * MIN_TOKENS)


def mismatches(steps: list[dict[str, float]], weights: WeightsConfig = VERIFY) -> list[str | None]:
    check = LogprobCheck(weights)
    return [check.mismatch(number, metrics) for number, metrics in enumerate(steps, start=1)]


def test_tokens_that_differ_in_several_steps_in_a_row_are_said_with_their_number() -> None:
    *before, why = mismatches([DIFFER] * STEPS_IN_A_ROW)
    assert before == [None] * (STEPS_IN_A_ROW - 1)
    assert why is not None and f"100% of {2 * MIN_TOKENS} tokens" in why and "0.25 nats" in why


def test_the_reason_says_whether_they_ever_agreed() -> None:
    never, once = (mismatches([*before, *[DIFFER] * STEPS_IN_A_ROW])[-1] for before in ([], [AGREE]))
    assert never is not None and "have not agreed in any step" in never
    assert once is not None and "agreed until step 1: the engine does not serve what the trainer sent" in once


NEARLY, FEW = [DIFFER] * (STEPS_IN_A_ROW - 1), measured([5.0] * (MIN_TOKENS - 1))
OUTLIERS = int(2 * MIN_TOKENS * LARGEST_FRACTION) - 1
ROUNDING = measured([0.03] * (2 * MIN_TOKENS - OUTLIERS) + [12.0] * OUTLIERS)


@pytest.mark.parametrize(
    ("steps", "is_mismatch"),
    [
        ([ROUNDING] * 10, False),
        ([*NEARLY, AGREE, *NEARLY], False),
        ([FEW] * 10, False),
        ([DIFFER, FEW, *NEARLY], True),
        ([measured([float("nan")] * MIN_TOKENS)] * STEPS_IN_A_ROW, True),
        ([{}] * STEPS_IN_A_ROW, False),
    ],
    ids=["rounding and outliers", "a step agrees", "too few tokens", "few between", "no numbers", "no fresh tokens"],
)
def test_only_many_tokens_that_differ_step_after_step_are_a_mismatch(
    steps: list[dict[str, float]], is_mismatch: bool
) -> None:
    assert any(mismatches(steps)) is is_mismatch


def test_nothing_is_said_without_being_asked() -> None:
    assert not any(mismatches([DIFFER] * STEPS_IN_A_ROW, WeightsConfig()))


def test_a_kept_kv_cache_cannot_be_verified() -> None:
    config = Config(weights=WeightsConfig(verify=True, kv_cache="keep"))
    with pytest.raises(ConfigError, match=r"weights\.verify: .*recompute"):
        check(config)
