"""What the dashboards' building blocks compute, by Prometheus itself, from series whose answer is known."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.dashboards.panels import last, last_ratio, mean, quantile, rate, rate_ratio

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
def test_a_building_block_gives_what_it_says_for_the_chosen_run(
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
