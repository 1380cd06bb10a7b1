"""The Grafana dashboards as files; `python -m scripts.docs` writes them to `deploy/grafana/`.

Grafana's JSON has hundreds of lines a dashboard; `scripts.panels` holds what differs between panels.
"""

from __future__ import annotations

import json
from typing import Any

from scripts.panels import DASHBOARDS, Dashboard, Panel

WIDTH = 24
HEIGHT = 8


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
        "templating": {"list": [_data_source(), _instances()]},
        "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True, "keepTime": True}],
        "panels": _laid_out(dashboard.panels),
    }
    return json.dumps(document, indent=1) + "\n"


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": "label_values(baton_run_info, instance)", "refId": "instances"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
    }


def _laid_out(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    """Panels from left to right, a new line where the next one does not fit."""
    out: list[dict[str, Any]] = []
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > WIDTH:
            x, y, height = 0, y + height, 0
        own = HEIGHT // 2 if panel.kind == "stat" else HEIGHT
        out.append(_panel(number, panel) | {"gridPos": {"x": x, "y": y, "w": panel.width, "h": own}})
        x, height = x + panel.width, max(height, own)
    return out


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
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": _OPTIONS[panel.kind],
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


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"},
    "heatmap": {"calculate": False, "yAxis": {"unit": "none"}, "cellGap": 1},
}


def dashboards_page() -> str:
    """`docs/dashboards.md`: what each panel means."""
    text = (
        "# Dashboards\n\nMade from `scripts/panels/` by `python -m scripts.docs`. The files in "
        "`deploy/grafana/dashboards/` are provisioned by `deploy/grafana/provisioning/`; the variable *Run* chooses "
        "the run. They are checked against a live Prometheus; they have not been rendered by a Grafana server.\n"
    )
    for dashboard in DASHBOARDS:
        text += f"\n## {dashboard.title.removeprefix('Baton: ').capitalize()}\n\n{dashboard.meaning}\n\n"
        text += "| panel | meaning |\n|---|---|\n"
        text += "".join(f"| {panel.title} | {panel.meaning} |\n" for panel in dashboard.panels)
    return text
