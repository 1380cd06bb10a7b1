import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service.config import Config
from service.config.core_settings import batch_settings, filter_settings
from service.errors import ConfigError, UserError
from service.handoff.batches.batch_metrics import group_stats, reward_metrics
from service.handoff.batches.credit import turn_advantages
from service.handoff.batches.estimators import ESTIMATORS, NoAdvantage, advantages, estimator
from service.types import Float64s, Int64s

RETURNS = [1.0, 0.0, 0.0, 1.0, 3.0, 2.0]
UIDS = ["a", "b", "a", "a", "b", "a"]


def test_grpo_divides_by_the_sample_deviation_of_the_group() -> None:
    a = np.array([1.0, 0.0, 1.0, 2.0])
    scores = advantages("grpo", RETURNS, UIDS)
    np.testing.assert_allclose(scores[[0, 2, 3, 5]], (a - 1) / (a.std(ddof=1) + 1e-6))


def test_the_other_estimators_follow_their_definitions() -> None:
    a = [0, 2, 3, 5]
    np.testing.assert_allclose(advantages("grpo_no_std", RETURNS, UIDS)[a], [0, -1, 0, 1])
    np.testing.assert_allclose(advantages("rloo", RETURNS, UIDS)[a], [0, -4 / 3, 0, 4 / 3])
    np.testing.assert_allclose(advantages("maxrl", RETURNS, UIDS)[a], np.array([0, -1, 0, 1]) / (1 + 1e-6))
    whitened = advantages("reinforce++_baseline", RETURNS, UIDS)
    assert whitened.mean() == pytest.approx(0) and whitened.std(ddof=1) == pytest.approx(1)


ROUNDED = {
    "sums in two orders": [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1] * 4,
    "float32 and float64": [float(np.float32(0.35)), 0.35] * 4,
    "a judge in float32": [1.0, float(np.float32(0.99999994))] * 4,
    "parts that cancel": [0.1 + 0.2 - 0.3, 0.0] * 4,
    "large": [-1e6, -1e6 - 0.06] * 4,
}


@pytest.mark.parametrize("return_G", [[0.1] * 8, *ROUNDED.values()], ids=str)
@pytest.mark.parametrize("name", ["grpo", "grpo_no_std", "rloo", "maxrl", "reinforce++_baseline"])
def test_groups_whose_returns_differ_by_rounding_only_have_advantages_of_exactly_zero(
    name: str, return_G: list[float]
) -> None:
    assert (advantages(name, [*return_G, *return_G], ["a"] * 8 + ["b"] * 8) == 0).all()
    stats = group_stats(np.array(return_G), np.zeros(8, np.int64))
    assert stats.flat == 1 and stats.zeros == (abs(return_G[0]) < 0.01) and stats.ones == (return_G[0] == 1)
    assert not by_turn("rloo", return_G) and not by_turn("grpo", return_G)


def by_turn(name: str, return_G: list[float]) -> bool:
    """Whether any turn has an advantage if each trajectory gets its return in two parts."""
    found = turn_advantages([[part / 2, part / 2] for part in return_G], [0] * 8, estimator=name)
    return bool(np.concatenate(found).any())


def test_a_small_difference_is_none_of_rounding() -> None:
    return_G = [0.5, 0.500001] * 4
    assert (advantages("grpo_no_std", return_G, ["a"] * 8) != 0).all() and by_turn("rloo", return_G)
    assert group_stats(np.array(return_G), np.zeros(8, np.int64)).flat == 0


def test_a_group_of_one_follows_the_published_definitions() -> None:
    assert advantages("grpo", [0.5], ["a"])[0] == pytest.approx(0.5 / (1 + 1e-6))
    assert advantages("grpo_no_std", [0.5], ["a"]).tolist() == [0.5]
    assert advantages("rloo", [0.5], ["a"]).tolist() == [0.0]
    assert advantages("maxrl", [0.5], ["a"]).tolist() == [0.5]


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of the user's that registers estimators."""
    (tmp_path / "my_estimators.py").write_text(
        "import numpy as np\n"
        "from service.handoff.batches.estimators import estimator\n"
        "@estimator('mine')\n"
        "def mine(returns_G, group_G):\n"
        "    return returns_G - returns_G.max()\n"
        "@estimator('broken')\n"
        "def broken(returns_G, group_G):\n"
        "    return np.full(len(returns_G), np.nan)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_estimators", None)
    for name in ("mine", "broken"):
        ESTIMATORS.pop(name, None)


def test_an_estimator_of_ones_own_is_named_with_its_module(own_module: None) -> None:
    named = Config.model_validate({"algorithm": {"estimator": "my_estimators:mine"}})
    assert batch_settings(named).rule.estimator == filter_settings(named).rule.estimator == "mine"
    assert advantages("mine", [1.0, 3.0], ["a", "a"]).tolist() == [-2.0, 0.0]
    with pytest.raises(UserError, match="no finite number for each of 2"):
        advantages("broken", [1.0, 3.0], ["a", "a"])
    for setting, said in (("my_estimators:mime", "did you mean 'mine'"), ("absent_module:mine", "cannot be imported")):
        with pytest.raises(ConfigError, match=said):
            batch_settings(Config.model_validate({"algorithm": {"estimator": setting}}))


def test_maxrl_has_no_advantage_where_it_would_divide_by_zero() -> None:
    assert advantages("maxrl", [-2e-6, 0.0, 1.0, 0.0], ["a", "a", "b", "b"]).tolist()[:2] == [0.0, 0.0]


def test_an_advantage_that_float32_cannot_hold_is_not_finite() -> None:
    @estimator("huge")
    def huge(returns_G: Float64s, group_G: Int64s) -> Float64s:
        return returns_G * 1e300

    try:
        with pytest.raises(NoAdvantage, match="number 1 has") as raised:
            advantages("huge", [0.0, 1.0, 0.0], ["a", "a", "a"])
        assert raised.value.trajectories == [1]
    finally:
        del ESTIMATORS["huge"]


def test_the_name_of_pass_at_k_is_the_same_if_trajectories_are_lost() -> None:
    group_G = np.repeat(np.arange(4), 8)
    for n_lost in range(4):
        assert "reward/avg_pass_at_8" in reward_metrics(group_stats(np.ones(32 - n_lost), group_G[: 32 - n_lost]))
