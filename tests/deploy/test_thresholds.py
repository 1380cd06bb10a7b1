"""Every alert fires just beyond its threshold and not just below it, and exactly when its `for` is over.

`rules_test.yaml` says what each alert means; here its numbers are held, so that none can change unseen.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = yaml.safe_load(Path("deploy/prometheus/rules.yaml").read_text())
MINUTE = 60
GRAIN = 30
"""Seconds between two evaluations."""
LAST = 30
"""Minutes of every series."""

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

Series = list[tuple[str, str]]


def series(name: str, values: str, **labels: str) -> Series:
    """One series of a run."""
    named = {"job": "baton", "instance": "run:9400", "ident": "one"} | labels
    return [(name + "{" + ",".join(f'{key}="{value}"' for key, value in named.items()) + "}", values)]


def rate(name: str, each_minute: float, **labels: str) -> Series:
    """A counter that two actors share, so that a maximum in place of the sum shows."""
    first, second = f"0+{each_minute / 4}x{LAST}", f"0+{each_minute * 3 / 4}x{LAST}"
    return series(name, first, **labels) + series(name, second, **labels | {"ident": "another"})


def gauge(name: str, value: float, **labels: str) -> Series:
    """A gauge of which another actor has a smaller value, so that a minimum or a sum in place of the maximum shows."""
    first, second = f"{value}x{LAST}", f"{value / 2}x{LAST}"
    return series(name, first, **labels) + series(name, second, **labels | {"ident": "another"})


def since(name: str, minute: int, **labels: str) -> Series:
    """A counter that counts once."""
    return series(name, f"0x{minute - 1} 1x{LAST}", **labels)


@dataclass(frozen=True)
class Case:
    """What makes an alert's condition true `true_at` seconds after the start, and what just does not."""

    alert: str
    true_at: int
    beyond: Series
    below: Series


def ratio(alert: str, threshold: float, made: Callable[[float], Series], true_at: int = MINUTE) -> Case:
    """A fraction that lies a twentieth beyond and below the threshold."""
    return Case(alert, true_at, made(threshold * 1.05), made(threshold * 0.95))


def buckets(share: float) -> Series:
    name = "baton_batch_padded_sequence_length"
    return [
        *series(f"{name}_alert_tokens", f"8192x{LAST}"),
        *rate(f"{name}_tokens_bucket", 100 * (1 - share), le="8192.0"),
        *rate(f"{name}_tokens_bucket", 100, le="+Inf"),
        *rate(f"{name}_tokens_count", 100),
    ]


def up(role: str, *values: int) -> Series:
    return [
        one for n, v in enumerate(values) for one in series("baton_actor_up", f"{v}x{LAST}", role=role, ident=str(n))
    ]


def lag(versions: int) -> Series:
    fresh, old = (series("baton_generator_policy_version", f"{v}x{LAST}", ident=str(v)) for v in (10, 10 - versions))
    return [*gauge("baton_policy_version", 10), *gauge("baton_staleness_budget_versions", 4), *fresh, *old]


def tokens(stepped: int) -> Series:
    fates = (("open", 600), ("stepped", stepped))
    held = [one for fate, count in fates for one in series("baton_tokens", f"{count}x{LAST}", fate=fate)]
    accepted = [series("baton_accepted_tokens_total", f"{count}x{LAST}", ident=str(count)) for count in (250, 750)]
    return [*held, *accepted[0], *accepted[1]]


def stalled(deadline: float) -> Series:
    return [
        *gauge("baton_last_optimizer_step_timestamp_seconds", 60),
        *gauge("baton_stall_deadline_seconds", deadline),
    ]


def shares(part: str, each_part: float, whole: str, each_whole: float) -> Callable[[float], Series]:
    """One counter as a share of another."""
    return lambda share: [*rate(part, each_part * share), *rate(whole, each_whole)]


def levels(part: str, whole: str) -> Callable[[float], Series]:
    """One gauge as a share of another."""
    return lambda share: [*gauge(part, 8 * share), *gauge(whole, 8)]


def divergence(fresh: float, every: float) -> Series:
    return [*gauge("baton_fresh_token_kl", fresh), *gauge("baton_policy_kl", every)]


def syncs(share: float) -> Series:
    return [
        *rate("baton_weight_sync_seconds_sum", 30 * share),
        *rate("baton_weight_sync_seconds_count", 6),
        *rate("baton_step_seconds_sum", 60),
        *rate("baton_step_seconds_count", 12),
    ]


def rewritten(share: float) -> Series:
    """Calls of agents of which a share was rendered anew; replayed ones do not count."""
    calls = "baton_agent_calls_total"
    return [
        *rate(calls, 200 * share, how="rerendered"),
        *rate(calls, 200 * (1 - share), how="appended"),
        *rate(calls, 100, how="replayed"),
    ]


def unscored(share: float) -> Series:
    """Groups of a scorer of which a share was refused."""
    groups = "baton_scorer_groups_total"
    return [
        *rate(groups, 200 * share, scorer="judge", outcome="refused"),
        *rate(groups, 200 * (1 - share), scorer="judge", outcome="scored"),
    ]


ABORTED = "baton_aborted_steps_total"
REFUSED = "baton_refused_messages_total"
LEAKED = "baton_environment_leaked_tasks"
FAILED = "baton_weight_sync_failures_total"
HARMLESS = [one for reason in ("fenced", "unknown_group", "lease") for one in since(REFUSED, 3, reason=reason)]
NODE = {"job": "node"}
UP, DOWN = f"1x{LAST}", f"0x{LAST}"
LENGTHS = levels("baton_batch_padded_sequence_length_last_tokens", "baton_batch_longest_row_tokens")
PADDING = shares("baton_batch_padding_tokens_total", 100, "baton_batch_tokens_total", 100)
MISMATCH = shares("baton_prefix_mismatch_total", 300, "baton_rows_before_merge_total", 300)
WAITS = shares("baton_trainer_wait_seconds_sum", 30, "baton_step_seconds_sum", 30)
STALE = shares("baton_batch_stale_tokens_total", 700, "baton_batch_sampled_tokens_total", 700)
RESERVED = levels("baton_buffer_reserved_bytes", "baton_buffer_limit_bytes")
EXPECTED = gauge("baton_generators_expected", 2)
CASES = [
    ratio("BatonPaddedSequenceLengthHigh", 0.1, buckets),
    ratio("BatonPaddingInflation", 1.2, LENGTHS, 0),
    ratio("BatonPaddingWasteHigh", 0.6, PADDING),
    ratio("BatonPrefixMergeCollapsed", 0.2, MISMATCH),
    ratio("BatonAgentsRewriteHistory", 0.05, rewritten),
    ratio("BatonScorerFails", 0.2, unscored),
    ratio("BatonBufferStarved", 0.5, WAITS),
    ratio("BatonBoundBySideWork", 0.4, lambda share: gauge("baton_binding_ratio", share, part="journal"), 0),
    ratio("BatonEvaluationLate", 2, lambda intervals: gauge("baton_evaluation_lag_intervals", intervals), 0),
    ratio("BatonBufferFull", 0.95, RESERVED, 0),
    ratio("BatonJournalFull", 0.9, levels("baton_journal_bytes", "baton_journal_limit_bytes"), 0),
    ratio("BatonStalenessOverBudget", 0.05, STALE),
    ratio("BatonWeightSyncSlow", 0.5, syncs),
    ratio("BatonGroupsWithoutVariance", 0.8, lambda share: gauge("baton_groups_without_variance", share), 0),
    ratio("BatonResponsesCut", 0.5, lambda share: gauge("baton_batch_truncated_ratio", share), 0),
    ratio("BatonLogprobMismatch", 0.01, lambda fresh: divergence(fresh, 0), 0),
    ratio("BatonLogprobMismatch", 0.1, lambda every: divergence(0, every), 0),
    Case("BatonTrainerStalled", 3 * MINUTE + GRAIN, stalled(240), stalled(320)),
    # Another run's old count is nobody's abort.
    Case(
        "BatonNonFiniteLoss",
        3 * MINUTE,
        since(ABORTED, 3) + series(ABORTED, f"7x{LAST}", instance="another:1"),
        series(ABORTED, f"7x{LAST}"),
    ),
    Case("BatonRefusedMessages", 3 * MINUTE, since(REFUSED, 3, reason="schema"), HARMLESS),
    Case("BatonLedgerOpen", 0, tokens(399), tokens(400)),
    Case(
        "BatonGeneratorsDown",
        0,
        EXPECTED + up("generator", 1, 0) + up("trainer", 1),
        EXPECTED + up("generator", 1, 1) + up("trainer", 0),
    ),
    Case("BatonWeightSyncFailing", 0, lag(5), lag(4)),
    Case("BatonWeightSyncFailing", 3 * MINUTE, since(FAILED, 3), series(FAILED, f"3x{LAST}")),
    Case("BatonStoreFailing", 0, gauge("baton_store_failing", 1), gauge("baton_store_failing", 0)),
    Case("BatonEpisodesLeak", 0, series(LEAKED, f"1x{LAST}"), series(LEAKED, f"0x{LAST}")),
    Case("BatonActorSilent", 0, up("buffer", 0) + up("trainer", 1), up("buffer", 1) + up("generator", 0)),
    Case(
        "BatonScrapeDown",
        0,
        series("up", DOWN) + series("up", DOWN, **NODE),
        series("up", UP) + series("up", DOWN, **NODE),
    ),
    Case("BatonAbsent", 0, series("up", UP, **NODE), series("up", UP)),
    Case("BatonWatchdog", 0, series("up", UP), []),
]


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": MINUTE}[text[-1]]


ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
HELD = {rule["alert"]: seconds(rule.get("for", "0m")) for rule in ALERTS}


def unit_tests() -> list[dict[str, Any]]:
    """For promtool: each case at the last evaluation before it fires, when it fires, and below its threshold."""
    made = []
    for case in CASES:
        firing = case.true_at + HELD[case.alert]
        beyond = [(firing, 1)] if firing < GRAIN else [(firing - GRAIN, 0), (firing, 1)]
        below = [] if case.alert == "BatonWatchdog" else [(firing, 0)]
        for inputs, expected in ((case.beyond, beyond), (case.below, below)):
            if expected:
                made.append(unit_test(case.alert, inputs, expected))
    return made


def unit_test(alert: str, inputs: Series, expected: list[tuple[int, int]]) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in inputs],
        "promql_expr_test": [
            {"expr": firing, "eval_time": f"{at}s", "exp_samples": [{"labels": "{}", "value": count}]}
            for at, count in expected
        ],
    }


def failing(rules: dict[str, Any], tests: list[dict[str, Any]], folder: Path) -> set[str]:
    """The alerts whose unit tests fail with these rules."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    whole = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": f"{GRAIN}s",
        "group_eval_order": [group["name"] for group in rules["groups"]],  # what is recorded, before who reads it
        "tests": tests,
    }
    (folder / "tests.yaml").write_text(yaml.safe_dump(whole))
    done = subprocess.run(
        ["promtool", "test", "rules", str(folder / "tests.yaml")],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    failed = set(re.findall(r'alertname=\\"(\w+)\\"', done.stdout + done.stderr))
    assert bool(failed) == bool(done.returncode), done.stdout + done.stderr
    return failed


@needs_promtool
def test_every_alert_fires_just_beyond_its_threshold_when_its_time_is_over(tmp_path: Path) -> None:
    assert {case.alert for case in CASES} == HELD.keys()
    assert failing(RULES, unit_tests(), tmp_path) == set()


def burst(part: str, whole: str, share: float) -> Series:
    """Half an hour of nothing, then three minutes of a share."""
    return series(part, f"0x30 {100 * share}+{100 * share}x2") + series(whole, f"0+100x{LAST + 3}")


BURSTS = [
    ("padding", 0.6, "baton_batch_padding_tokens_total", "baton_batch_tokens_total"),
    ("prefix_mismatch", 0.2, "baton_prefix_mismatch_total", "baton_rows_before_merge_total"),
    ("stale_tokens", 0.05, "baton_batch_stale_tokens_total", "baton_batch_sampled_tokens_total"),
    ("trainer_wait", 0.5, "baton_trainer_wait_seconds_sum", "baton_step_seconds_sum"),
]


@needs_promtool
def test_shares_are_of_a_quarter_of_an_hour_so_that_a_short_burst_is_none(tmp_path: Path) -> None:
    tests = []
    for name, threshold, part, whole in BURSTS:
        test = unit_test(name, burst(part, whole, 2 * threshold), [(33 * MINUTE, 0)])
        test["promql_expr_test"][0]["expr"] = f"count(instance:baton_{name}:ratio_rate15m > {threshold}) or vector(0)"
        tests.append(test)
    assert failing(RULES, tests, tmp_path) == set()
