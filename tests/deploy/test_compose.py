"""The containers of `deploy/monitoring/compose.yaml` find the files that they are started with."""

import os
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path("deploy").absolute()
FILE = DEPLOY / "monitoring" / "compose.yaml"
DOCUMENT: dict[str, Any] = yaml.safe_load(FILE.read_text())
RUNS = "${BATON_RUNS:-../../runs}"


def mounts(service: str) -> dict[str, Path]:
    """Path in the container -> folder of the checkout, without volumes."""
    split = [volume.replace(RUNS, "../../runs").split(":") for volume in DOCUMENT["services"][service]["volumes"]]
    return {parts[1]: (FILE.parent / parts[0]).resolve() for parts in split if "/" in parts[0]}


def outside(service: str, path: str) -> Path:
    """Where a file of a container lies in the checkout."""
    place = next(place for place in mounts(service) if path.startswith(f"{place}/") or path == place)
    return mounts(service)[place] / path[len(place) :].lstrip("/")


def test_prometheus_finds_the_rules_and_the_runs_from_its_configuration() -> None:
    for service in ("alertmanager", "prometheus"):
        (given,) = [word for word in DOCUMENT["services"][service]["command"] if word.startswith("--config.file=")]
        assert outside(service, given.partition("=")[2]).is_file()
    folder = Path(given.partition("=")[2]).parent
    configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    for rules in configuration["rule_files"]:
        assert outside("prometheus", str(folder / rules)).is_file()
    for job in configuration["scrape_configs"]:
        for pattern in (file for found in job["file_sd_configs"] for file in found["files"]):
            inside = os.path.normpath(folder / pattern)
            assert outside("prometheus", inside) == DEPLOY.parent / "runs" / ".prometheus" / "[^.]*.json"


def test_grafana_finds_dashboards_and_the_datasource_by_its_name() -> None:
    provided = yaml.safe_load(outside("grafana", "/etc/grafana/provisioning/dashboards/baton.yaml").read_text())
    for provider in provided["providers"]:
        assert list(outside("grafana", provider["options"]["path"]).glob("*.json"))
    sources = yaml.safe_load(outside("grafana", "/etc/grafana/provisioning/datasources/prometheus.yaml").read_text())
    hosts = dict(entry.split(":") for entry in DOCUMENT["services"]["grafana"]["extra_hosts"])
    for source in sources["datasources"]:
        name, _, port = source["url"].removeprefix("http://").partition(":")
        assert f"--web.listen-address={hosts[name]}:{port}" in DOCUMENT["services"]["prometheus"]["command"]


def test_nothing_listens_outside_of_this_machine() -> None:
    words = [word for service in DOCUMENT["services"].values() for word in service.get("command", [])]
    assert {word.partition("=")[2].split(":")[0] for word in words if "listen-address" in word} <= {"127.0.0.1", ""}
    assert DOCUMENT["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
