"""The dashboards' structure: what Grafana would reject or draw wrongly; and what their building blocks compute."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboards.pages import DASHBOARDS
from scripts.dashboards.panels import last, last_ratio, mean, quantile, rate, rate_ratio
from tests.deploy.test_rules import known_series

FOLDER = Path("deploy/grafana")
FILES = sorted((FOLDER / "dashboards").glob("*.json"))
DOCUMENTS = {file.stem: json.loads(file.read_text()) for file in FILES}
UNITS = {"none", "s", "bytes", "Bps", "percentunit"}


def test_there_is_a_file_for_every_dashboard_and_no_other() -> None:
    assert set(DOCUMENTS) == {dashboard.uid for dashboard in DASHBOARDS}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=list(DOCUMENTS))
def test_panels_have_what_a_reader_needs_and_do_not_overlap(document: dict[str, Any]) -> None:
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["type"] in ("timeseries", "stat", "heatmap")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells
    assert {variable["name"] for variable in document["templating"]["list"]} == {"datasource", "instance"}


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=list(DOCUMENTS))
def test_every_expression_asks_for_metrics_that_exist_and_for_the_chosen_run_only(document: dict[str, Any]) -> None:
    known = known_series()
    for panel in document["panels"]:
        for target in panel["targets"]:
            used = re.findall(r"(?<![:\w])(baton_\w+)(\{[^}]*\})?", target["expr"])
            assert used or "instance:baton_" in target["expr"]
            assert {name for name, _ in used} <= known
            assert all('instance=~"$instance"' in selector for _, selector in used), target["expr"]


def test_dashboards_named_in_alerts_exist() -> None:
    rules = yaml.safe_load(Path("deploy/prometheus/rules.yaml").read_text())
    named = {r["annotations"]["dashboard"] for group in rules["groups"] for r in group["rules"] if "alert" in r}
    assert named <= {f"/d/{uid}" for uid in DOCUMENTS}


SERIES = {
    'work_total{instance="run",ident="a",kind="x"}': "0+30x10",
    'work_total{instance="run",ident="b",kind="y"}': "0+90x10",
    'whole_total{instance="run"}': "0+240x10",
    'level{instance="run",ident="a"}': "3x10",
    'level{instance="run",ident="b"}': "5x10",
    'limit{instance="run"}': "20x10",
    'took_sum{instance="run"}': "0+90x10",
    'took_count{instance="run"}': "0+60x10",
    'took_bucket{instance="run",le="1.0"}': "0x10",
    'took_bucket{instance="run",le="2.0"}': "0+60x10",
    'took_bucket{instance="run",le="+Inf"}': "0+60x10",
    **{f'{name}{{instance="another"}}': "0+7x10" for name in ("work_total", "whole_total", "level", "limit")},
}
"""120 units of work a minute in two actors, of 240; levels of 3 and 5, of 20; 60 times a minute 1.5 s, from 1 to 2."""
KNOWN = [
    (rate("work_total"), {"": 2.0}),
    (rate("work_total", "kind"), {',kind="x"': 0.5, ',kind="y"': 1.5}),
    (last("level"), {"": 5.0}),
    (mean("took"), {"": 1.5}),
    (quantile(0.5, "took"), {"": 1.5}),
    (quantile(0.99, "took"), {"": 1.99}),
    (rate_ratio("work_total", "whole_total"), {"": 0.5}),
    (last_ratio("level", "limit"), {"": 0.25}),
]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(("expr", "values"), KNOWN, ids=[expr for expr, _ in KNOWN])
def test_a_building_block_gives_what_it_says_to_prometheus_for_the_chosen_run(
    expr: str, values: dict[str, float], tmp_path: Path
) -> None:
    chosen = expr.replace("$__rate_interval", "5m").replace("$instance", "run")
    samples = [{"labels": f'{{instance="run"{more}}}', "value": value} for more, value in values.items()]
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in SERIES.items()],
        "promql_expr_test": [{"expr": chosen, "eval_time": "10m", "exp_samples": samples}],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    command = ["promtool", "test", "rules", str(tmp_path / "tests.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
