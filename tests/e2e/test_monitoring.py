"""Monitoring with real servers: the alert chain up to a webhook, and a real run under a real Prometheus."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import psutil
import pytest
import yaml

from actors.metrics_hub import MetricsHub
from service.config import Config, load_config
from service.measure import measure_run, measure_step
from service.metrics import Boundaries, Metrics
from service.panels import DASHBOARDS

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="prometheus and prometheus-alertmanager are not installed (Debian packages of these names)",
    ),
]


class Run:
    """A run's metrics service in a thread; ten steps a second, with batches of the padded length it is told."""

    def __init__(self, config: Config) -> None:
        self.length = 100
        self.url = ""
        self._metrics = Metrics("driver", "driver", Boundaries.of(config))
        measure_run(self._metrics, config, "test")
        self._hub = MetricsHub(config.model_dump_json())
        self._stopped = threading.Event()
        self._served = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.url = await self._hub.start()
        self._served.set()
        while not self._stopped.is_set():
            line = {"generate/batch_padded_seq_len": self.length, "generate/batch_longest_row": self.length}
            measure_step(self._metrics, {**line, "trainer/global_step": 1}, time.time())
            await self._hub.push("driver/driver", self._metrics.snapshot())
            await asyncio.sleep(0.1)
        await self._hub.stop()

    def __enter__(self) -> "Run":
        self._thread.start()
        assert self._served.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(10)


@pytest.fixture
def webhook() -> Iterator[tuple[str, "Queue[dict[str, Any]]"]]:
    received: Queue[dict[str, Any]] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                received.put(alert)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/alerts", received
        server.shutdown()
        thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., None]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str, ready: str) -> None:
        with (tmp_path / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path))
        deadline = time.monotonic() + 20
        while True:
            try:
                with urllib.request.urlopen(ready, timeout=1):
                    return
            except OSError:
                if time.monotonic() > deadline or running[-1].poll() is not None:
                    raise AssertionError((tmp_path / f"{name}.log").read_text()) from None
                time.sleep(0.05)

    yield start
    for process in running:
        process.kill()
        process.wait()


def start_prometheus(start_server: Callable[..., None], port: int) -> None:
    address = f"127.0.0.1:{port}"
    start_server(
        "prometheus", str(PROMETHEUS), "--config.file=prometheus.yaml", f"--web.listen-address={address}",
        "--storage.tsdb.path=tsdb", "--rules.alert.resend-delay=1s", ready=f"http://{address}/-/ready",
    )  # fmt: skip


def write_configs(folder: Path, target: str, webhook: str, alertmanager: int, window: str) -> None:
    """The shipped files, with the test's addresses, and short times so that the whole chain fits into a test."""
    rules = Path("deploy/prometheus/rules.yaml").read_text()
    rules = re.sub(r"\[\d+m\]", f"[{window}]", rules)
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    (folder / "rules.yaml").write_text(rules)
    prometheus = yaml.safe_load(Path("deploy/prometheus/prometheus.yaml").read_text())
    prometheus["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    prometheus["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    prometheus["scrape_configs"][1]["http_sd_configs"][0]["url"] = f"http://{target}/sd"
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(prometheus))
    manager = yaml.safe_load(Path("deploy/prometheus/alertmanager.yaml").read_text())
    manager["route"].update(group_wait="200ms", group_interval="500ms")
    for receiver in manager["receivers"]:
        for hook in receiver.get("webhook_configs", []):
            hook["url"] = webhook
    (folder / "alertmanager.yaml").write_text(yaml.safe_dump(manager))


def wait_for(received: "Queue[dict[str, Any]]", alert: str, status: str, seconds: float) -> dict[str, Any]:
    """The first notice of an alert with a status; others are passed over."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            notice = received.get(timeout=max(0.01, deadline - time.monotonic()))
        except Empty:
            raise AssertionError(f"{alert} was not {status} within {seconds} s") from None
        if (notice["labels"]["alertname"], notice["status"]) == (alert, status):
            return notice


def test_a_long_batch_fires_the_padded_length_alert_at_the_webhook_and_it_resolves(
    tmp_path: Path, webhook: tuple[str, "Queue[dict[str, Any]]"], start_server: Callable[..., None]
) -> None:
    url, received = webhook
    prometheus_port, manager_port = free_port(), free_port()
    config = load_config([], ["metrics.port=0"])
    with Run(config) as run:
        write_configs(tmp_path, run.url.removeprefix("http://"), url, manager_port, "5s")
        manager = f"127.0.0.1:{manager_port}"
        start_server(
            "alertmanager", str(ALERTMANAGER), "--config.file=alertmanager.yaml", f"--web.listen-address={manager}",
            "--cluster.listen-address=", "--storage.path=am", ready=f"http://{manager}/-/ready",
        )  # fmt: skip
        start_prometheus(start_server, prometheus_port)
        start = time.monotonic()
        wait_for(received, "BatonWatchdog", "firing", 10)
        run.length = 1100
        notice = wait_for(received, "BatonPaddedSequenceLengthHigh", "firing", 15)
        assert notice["labels"]["severity"] == "warning"
        assert re.match(r"[\d.]+% of mini-batches on 127\.0\.0\.1:\d+ are padded", notice["annotations"]["summary"])
        assert notice["annotations"]["runbook"] == "docs/runbooks.md#batonpaddedsequencelengthhigh"
        run.length = 100
        wait_for(received, "BatonPaddedSequenceLengthHigh", "resolved", 20)
        print(f"the chain took {time.monotonic() - start:.1f} s")


NO_DATA_IN_A_HEALTHY_RUN = {
    "baton_environment_errors_total": "no environment fails",
    "baton_restarted_trajectories_total": "no trajectory starts anew",
}


@pytest.fixture
def real_run(tmp_path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The quickstart under way, with a threshold below which no real batch stays: its metrics' address, its driver."""
    command = [sys.executable, "-m", "service", "run", "--config", "configs/quickstart.yaml", f"run.dir={tmp_path}"]
    settings = ["run.max_steps=100000", "model.warm_start.steps=10", "metrics.port=0", "metrics.long_batch_tokens=10"]
    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen([*command, *settings], stdout=log, stderr=log)
    try:
        address = tmp_path / "quickstart" / "address.json"
        lines = tmp_path / "quickstart" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (address.exists() and lines.exists() and lines.read_text().count("\n") >= 3):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "run.log").read_text()
            time.sleep(0.2)
        yield json.loads(address.read_text())["url"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def asked(prometheus: str, expr: str) -> list[dict[str, Any]]:
    query = expr.replace("$__rate_interval", "10s").replace("$instance", ".+")
    answer = get_json(f"http://{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": query}))
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


def numbers(prometheus: str, expr: str) -> list[float]:
    return [float(sample["value"][1]) for sample in asked(prometheus, expr)]


def measuring_seconds(url: str) -> float:
    """CPU seconds that all actors of a run have spent on measuring."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return sum(float(value) for value in re.findall(r"^baton_metrics_seconds_total\{.*\} (\S+)$", page, re.MULTILINE))


def cpu_seconds(driver: psutil.Process) -> float:
    """CPU seconds of a run's processes, those that have ended under a living parent included."""
    times = [process.cpu_times() for process in (driver, *driver.children(recursive=True))]
    return sum(spent.user + spent.system + spent.children_user + spent.children_system for spent in times)


def firing_alerts(prometheus: str) -> set[str]:
    alerts = get_json(f"http://{prometheus}/api/v1/alerts")["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def empty_panels(prometheus: str) -> list[str]:
    """Expressions of the dashboards that return nothing, except those that a healthy run leaves empty."""
    return [
        f"{panel.title}: {query.expr}"
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
        if not any(name in query.expr for name in NO_DATA_IN_A_HEALTHY_RUN)
        if not asked(prometheus, query.expr)
    ]


@pytest.mark.timeout(480)
def test_a_real_run_fills_every_panel_fires_the_length_alert_and_costs_little(
    tmp_path: Path,
    real_run: tuple[str, psutil.Process],
    webhook: tuple[str, "Queue[dict[str, Any]]"],
    start_server: Callable[..., None],
) -> None:
    url, driver = real_run
    prometheus = f"127.0.0.1:{free_port()}"
    write_configs(tmp_path, url.removeprefix("http://"), webhook[0], free_port(), "30s")
    start_prometheus(start_server, int(prometheus.rpartition(":")[2]))
    deadline = time.monotonic() + 90
    while (empty := empty_panels(prometheus)) and time.monotonic() < deadline:
        time.sleep(1)
    assert empty == []
    while "BatonPaddedSequenceLengthHigh" not in (firing := firing_alerts(prometheus)):
        assert time.monotonic() < deadline, firing
        time.sleep(0.5)
    assert not firing & {"BatonLedgerOpen", "BatonNonFiniteLoss", "BatonGeneratorsDown", "BatonActorSilent"}

    open_ledgers = "count_over_time((sum(baton_tokens) != sum(baton_accepted_tokens_total))[1m:500ms])"
    assert numbers(prometheus, open_ledgers) == []
    assert max(numbers(prometheus, 'max_over_time(scrape_duration_seconds{job="baton"}[1m])')) < 0.5
    measuring, working = measuring_seconds(url), cpu_seconds(driver)
    time.sleep(20)
    assert measuring_seconds(url) - measuring < 0.01 * (cpu_seconds(driver) - working)
    status = get_json(f"{url}/status")
    assert status["state"] == "training" and status["policy_version"]["step"] >= 3
    assert {actor["role"] for actor in status["actors"]} >= {"buffer", "driver", "generator"}
