"""The dashboards' structure: what Grafana would reject or draw wrongly."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboards.pages import DASHBOARDS
from service.observe.metrics_table import TABLE

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
    known = {metric.name for metric in TABLE}
    for metric in TABLE:
        if metric.kind == "histogram":
            known |= {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
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
