"""The alert rules: each is tested, documented, and built on metrics that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.observe.metrics_table import TABLE

FOLDER = Path("deploy/prometheus")
RULES = [
    rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]  # fmt: skip
ALERTS = [rule for rule in RULES if "alert" in rule]
UNIT_TESTS = yaml.safe_load((FOLDER / "rules_test.yaml").read_text())["tests"]

ISSUED_BY_PROMETHEUS = {"up"}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_three_unit_tests(rule: dict[str, Any]) -> None:
    series = {test["name"]: len(test["input_series"]) for test in UNIT_TESTS}
    names = [name for name in series if name.startswith(rule["alert"] + " ")]
    assert len(names) >= 3
    assert any(" fires: " in name for name in names)
    assert min(series[name] for name in names) < max(series[name] for name in names), "none lacks data"
    if rule["alert"] != "BatonWatchdog":
        assert any(" is quiet: " in name for name in names)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_how_bad_it_is_and_where_to_look(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info", "none")
    assert set(rule["annotations"]) == {"summary", "description", "dashboard", "runbook"}
    page, anchor = rule["annotations"]["runbook"].split("#")
    headings = re.findall(r"^## (\w+)$", Path(page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


def test_every_runbook_section_belongs_to_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", Path("docs/runbooks.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in sorted(ALERTS, key=lambda rule: headings.index(rule["alert"]))]


def known_series() -> set[str]:
    """The names under which Prometheus has the metrics."""
    of_histograms = {f"{m.name}_{part}" for m in TABLE if m.kind == "histogram" for part in ("bucket", "count", "sum")}
    return {metric.name for metric in TABLE} | of_histograms


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_rule_is_built_on_metrics_that_exist(rule: dict[str, Any]) -> None:
    known = known_series() | {rule["record"] for rule in RULES if "record" in rule}
    used = set(re.findall(r"\b(?:instance:)?baton_\w+(?::\w+)?", rule["expr"]))
    assert used <= known | ISSUED_BY_PROMETHEUS


def seconds(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh])", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def test_a_notice_is_repeated_about_as_often_as_its_route_says() -> None:
    """Alertmanager looks at a repetition only when a group interval ends, so the notice may be that much later."""
    top = yaml.safe_load((FOLDER / "alertmanager.yaml").read_text())["route"]
    for route in [top, *(top | own for own in top["routes"])]:
        assert seconds(route["group_interval"]) <= seconds(route["repeat_interval"]) / 10, route
