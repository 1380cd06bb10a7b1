"""What environments say of their trajectories reaches `metrics.jsonl` as means over those that ended since."""

import copy
import math
from typing import Any

from service.observe.metrics_table import MAX_INFO_NAMES
from service.rollout.environments.env_metrics import EnvMetricMeans, EnvMetrics


def status(sums: EnvMetrics, name: str = "generator-0", pid: int = 1) -> dict[str, Any]:
    return {"name": name, "pid": pid, "environments": copy.deepcopy(sums.sums)}


def test_a_mean_is_over_the_trajectories_that_ended_since_the_last_one_and_what_is_not_given_is_0() -> None:
    sums, means = EnvMetrics(), EnvMetricMeans()
    sums.add("search", {"searches": 3.0, "right": 1.0})
    sums.add("search", {"searches": 1.0})
    assert means.since([status(sums)]) == {"environment/search/searches": 2.0, "environment/search/right": 0.5}
    assert means.since([status(sums)]) == {}
    sums.add("search", {"searches": 5.0})
    assert means.since([status(sums)]) == {"environment/search/searches": 5.0, "environment/search/right": 0.0}


def test_generators_and_environments_are_told_apart_and_one_that_starts_again_counts_anew() -> None:
    first, second, means = EnvMetrics(), EnvMetrics(), EnvMetricMeans()
    first.add("sql", {"queries": 4.0})
    second.add("sql", {"queries": 2.0})
    second.add("my_envs:Hangman", {"won": 1.0})
    both = [status(first), status(second, "generator-1", 2)]
    assert means.since(both) == {"environment/sql/queries": 3.0, "environment/my_envs:Hangman/won": 1.0}
    again = EnvMetrics()
    again.add("sql", {"queries": 1.0})
    assert means.since([status(again, pid=3), both[1]]) == {"environment/sql/queries": 1.0}


def test_what_is_not_finite_spoils_no_mean_and_names_without_end_are_not_kept() -> None:
    sums, means = EnvMetrics(), EnvMetricMeans()
    sums.add("e", {"a": math.nan})
    sums.add("e", {"a": 1.0, "trajectories": 50.0})
    assert means.since([status(sums)]) == {"environment/e/a": 0.5}
    for number in range(1000):
        sums.add("e", {f"name {number}": 1.0})
    assert len(means.since([status(sums)])) == MAX_INFO_NAMES
