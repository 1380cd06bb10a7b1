"""The Grafana dashboards as the JSON files that Grafana provisions, and as a page of the documentation."""

from __future__ import annotations

import json
from typing import Any

from scripts.dashboards.pages import DASHBOARDS
from scripts.dashboards.panels import Dashboard, Panel

WIDTH = 24
HEIGHT = 8

DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

VARIABLES = [
    {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
    {
        "name": "instance",
        "label": "Run",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": "label_values(baton_run_info, instance)", "refId": "instances"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
    },
]

OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"},
    "heatmap": {"calculate": False, "yAxis": {"unit": "none"}, "cellGap": 1},
}


def grafana_json(dashboard: Dashboard) -> str:
    """The file that Grafana provisions."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.meaning,
        "tags": ["baton"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": VARIABLES},
        "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True, "keepTime": True}],
        "panels": _panels(dashboard),
    }
    return json.dumps(document, indent=1) + "\n"


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """The panels with their positions; a row of numbers is half as high as a row of graphs."""
    placed: list[dict[str, Any]] = []
    y = 0
    for count in dashboard.rows:
        row = dashboard.panels[len(placed) : len(placed) + count]
        height = HEIGHT // 2 if all(panel.kind == "stat" for panel in row) else HEIGHT
        for column, panel in enumerate(row):
            own = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
            position = {"x": column * WIDTH // count, "y": y, "w": WIDTH // count, "h": own}
            placed.append(_panel(len(placed) + 1, panel) | {"gridPos": position})
        y += height
    return placed


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"lineWidth": 2, "fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
        custom["stacking"] = {"mode": "normal" if panel.stacked else "none"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": DATA_SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query.expr,
                "legendFormat": query.legend,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def dashboards_page() -> str:
    """The text of `docs/dashboards.md`, which lists them; a panel has its meaning as its description."""
    text = (
        "# Dashboards\n\nMade from `scripts/dashboards/` by `python -m scripts.docs`. [Operations](operations.md"
        "#prometheus-alertmanager-grafana) says how to start Grafana with them. The variable *Run* chooses the run, "
        "and is empty until a run has started its actors. Panels of parts that a run does not use stay empty. The "
        "queries are checked against a live Prometheus; no Grafana server has rendered the dashboards.\n"
    )
    text += "\n| dashboard | what it shows |\n|---|---|\n"
    for dashboard in DASHBOARDS:
        text += f"| {dashboard.title.removeprefix('Baton: ')} | {dashboard.meaning} |\n"
    return text
