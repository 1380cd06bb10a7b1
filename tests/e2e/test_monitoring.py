"""A real run under a real Prometheus and a real Alertmanager: the alert chain up to a webhook, and every panel."""

import json
import math
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

import psutil
import pytest
import yaml

from actors.driver.prepare import prepare
from scripts.dashboards.pages import DASHBOARDS
from service.config import load_config
from service.observe.metrics_table import TABLE
from service.rollout.prompts.rows import write_rows
from service.run.folder import TARGETS
from tests.e2e.conftest import driving
from tests.waiting import free_port, until

ROOT = Path(__file__).parents[2]

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="prometheus and prometheus-alertmanager are not installed (Debian packages of these names)",
    ),
]


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


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., None]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *command: str, ready: str) -> None:
        with (tmp_path / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path))

        def answers() -> bool:
            assert running[-1].poll() is None, (tmp_path / f"{name}.log").read_text()
            try:
                with urllib.request.urlopen(ready, timeout=10):
                    return True
            except OSError:
                return False

        until(answers, 120, (tmp_path / f"{name}.log").read_text)

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


def write_configs(folder: Path, runs: Path, webhook: str, alertmanager: int, window: str) -> None:
    """The shipped files, with the test's addresses, and short times so that the whole chain fits into a test."""
    rules = Path("deploy/prometheus/rules.yaml").read_text()
    rules = re.sub(r"\[\d+m\]", f"[{window}]", rules)
    rules = re.sub(r"for: \d+m", "for: 1s", rules)
    (folder / "rules.yaml").write_text(rules)
    prometheus = yaml.safe_load(Path("deploy/prometheus/prometheus.yaml").read_text())
    prometheus["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"}
    prometheus["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{alertmanager}"]
    for job in prometheus["scrape_configs"]:
        job["file_sd_configs"][0]["files"] = [f"{runs}/{TARGETS}/*.json"]
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


NO_DATA_IN_A_HEALTHY_RUN = {
    "baton_environment_errors_total": "no environment fails",
    "baton_restarted_trajectories_total": "no trajectory starts anew",
    "baton_agent_": "no agent calls the policy",
    "baton_curriculum_": "there is no curriculum",
    "baton_scorer_": "there are no scorers",
    "baton_store_": "there is no object store",
    "baton_evaluation_lag_": "no evaluation goes on beside training",
    "baton_weight_sent_bytes_total": "the engines read the memory of the ranks, which are on their host",
}


LONG_TOKENS = 120
"""Between the longest trajectory of the run (4 turns of a few words) and a prompt with `long_prompts.WORDS` more."""


ACTORS = {"buffer", "driver", "generator-0", "trainer-0", "trainer-1"}
MAX_MEASURING = 0.01
"""CPU seconds a second that an actor may spend on measuring."""


class RealRun(NamedTuple):
    """A run under way."""

    url: str
    driver: psutil.Process
    folder: Path
    flag: Path
    """While it exists, prompts are long."""


def settings_of(folder: Path, flag: Path) -> list[str]:
    """The quickstart without an end, with the prompts of `long_prompts`; its model and rows are made here."""
    config = load_config([ROOT / "configs/quickstart.yaml"], ["data.make_rows=512"])
    prepared = prepare(config, folder / "made")
    rows = [json.loads(line) for line in prepared.tasks_file.read_text().splitlines()]
    write_rows(folder / "rows.jsonl", [{**row, "env_class": None} for row in rows])
    return [
        f"model={{path: {prepared.model_folder}, make: null, warm_start: null}}",
        f"data={{train: {folder / 'rows.jsonl'}, make_rows: null}}",
        "env.name=tests.e2e.long_prompts:LongPrompts",
        "env.trusted_modules=[tests.e2e.long_prompts]",
        f"env.options={{flag: {flag}}}",
        "generator.max_input_length=256",
        f"metrics={{port: 0, long_batch_tokens: {LONG_TOKENS}}}",
        "run.max_steps=100000",
    ]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRun]:
    """A small run with real engines and a real trainer, after its third step."""
    folder = tmp_path_factory.mktemp("monitored")
    with driving(folder) as start:
        run = start(settings_of(folder, folder / "long"))
        run.until_step(3)
        url = json.loads((run.folder / "address.json").read_text())["url"]
        yield RealRun(url, psutil.Process(run.process.pid), folder, folder / "long")
        run.stop()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def get_json(url: str) -> Any:
    return json.loads(get(url))


def asked(prometheus: str, expr: str) -> list[dict[str, Any]]:
    query = expr.replace("$__rate_interval", "10s").replace("$instance", ".+")
    answer = get_json(f"http://{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": query}))
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


def numbers(prometheus: str, expr: str) -> list[float]:
    return [float(sample["value"][1]) for sample in asked(prometheus, expr)]


def measuring_seconds(url: str) -> float:
    """CPU seconds that all actors of a run have spent on measuring."""
    spent = r"^baton_metrics_seconds_total\{.*\} (\S+)$"
    return sum(float(value) for value in re.findall(spent, get(f"{url}/metrics"), re.MULTILINE))


def long_batches(url: str) -> float:
    """How many mini-batches were padded beyond the threshold."""
    bucket = r'^baton_batch_padded_sequence_length_tokens_bucket{.*\ble="(.+?)".*} (\S+)$'
    upto = {float(bound): float(count) for bound, count in re.findall(bucket, get(f"{url}/metrics"), re.MULTILINE)}
    return upto.get(math.inf, 0.0) - upto.get(LONG_TOKENS, 0.0)


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


@pytest.mark.timeout(1000)
def test_a_real_run_fills_every_panel_closes_its_ledger_and_costs_little(
    tmp_path: Path,
    real_run: RealRun,
    start_server: Callable[..., None],
) -> None:
    prometheus = f"127.0.0.1:{free_port()}"
    write_configs(tmp_path, real_run.folder, "http://127.0.0.1:9/", free_port(), "30s")
    start_prometheus(start_server, int(prometheus.rpartition(":")[2]))
    measuring, began = measuring_seconds(real_run.url), time.monotonic()
    until(lambda: not empty_panels(prometheus), 240, lambda: empty_panels(prometheus), pause=1.0)
    assert not firing_alerts(prometheus) & {"BatonLedgerOpen", "BatonNonFiniteLoss"}
    # An actor that gets no time on a loaded machine is silent for a moment.
    absent = {"BatonGeneratorsDown", "BatonActorSilent"}
    until(lambda: not firing_alerts(prometheus) & absent, 120, lambda: firing_alerts(prometheus), pause=0.5)

    open_ledgers = "count_over_time((sum(baton_tokens) != sum(baton_accepted_tokens_total))[1m:500ms])"
    assert numbers(prometheus, open_ledgers) == []
    time.sleep(max(0.0, began + 20 - time.monotonic()))
    measured = measuring_seconds(real_run.url) - measuring
    # Not the share: beside other work a run gets less of the machine, while it measures once a second as ever.
    assert measured / len(ACTORS) / (time.monotonic() - began) < MAX_MEASURING
    status = get_json(f"{real_run.url}/status")
    assert status["state"] == "training" and status["policy_version"]["step"] >= 3
    assert status["run"]["started"] < status["run"]["stepped"] <= status["time"]
    until(lambda: up(get_json(f"{real_run.url}/status")) == ACTORS, 120)
    until(lambda: len(numbers(prometheus, "baton_process_cpu_seconds_total > 0")) == len(ACTORS), 120)


def up(status: dict[str, Any]) -> set[str]:
    """The actors that were heard of in the last seconds."""
    return {actor["ident"] for actor in status["actors"] if actor["state"] == "up"}


def test_a_few_gauges_stand_beside_rays_own(real_run: RealRun) -> None:
    (file,) = (real_run.folder / TARGETS).glob("*.json")
    targets = [group for group in json.loads(file.read_text()) if group["labels"]["__meta_baton_kind"] == "ray"]
    wanted = {f"ray_{metric.name}" for metric in TABLE if metric.in_ray}

    def shown() -> list[str]:
        page = get(f"http://{targets[0]['targets'][0]}/metrics")
        return [line for line in page.splitlines() if line.startswith("ray_baton_")]

    def states(lines: list[str]) -> set[str]:
        return {state for line in lines for state in re.findall(r'state="(\w+)"', line)}

    until(lambda: {line.partition("{")[0] for line in shown()} >= wanted, 180, shown)
    until(lambda: states(shown()) >= {"open", "complete", "leased"}, 60, shown)
    assert len(wanted) == 4 and all('run="quickstart"' in line for line in shown())


CHAIN_SECONDS = 30
"""From the page that shows a long mini-batch to the webhook; how soon there is one is the machine's affair."""


@pytest.mark.timeout(900)
def test_a_long_batch_of_a_real_run_fires_the_length_alert_at_the_webhook_and_it_resolves(
    tmp_path: Path,
    real_run: RealRun,
    webhook: tuple[str, "Queue[dict[str, Any]]"],
    start_server: Callable[..., None],
) -> None:
    url, received = webhook
    manager = f"127.0.0.1:{free_port()}"
    write_configs(tmp_path, real_run.folder, url, int(manager.rpartition(":")[2]), "10s")
    start_server(
        "alertmanager", str(ALERTMANAGER), "--config.file=alertmanager.yaml", f"--web.listen-address={manager}",
        "--cluster.listen-address=", "--storage.path=am", ready=f"http://{manager}/-/ready",
    )  # fmt: skip
    start_prometheus(start_server, free_port())
    wait_for(received, "BatonWatchdog", "firing", 120)
    before = long_batches(real_run.url)
    real_run.flag.touch()
    began = time.monotonic()
    try:
        until(lambda: long_batches(real_run.url) > before, 300)
        served = time.monotonic() - began
        notice = wait_for(received, "BatonPaddedSequenceLengthHigh", "firing", 120)
    finally:
        real_run.flag.unlink()
    fired = time.monotonic() - began
    assert fired - served < CHAIN_SECONDS
    assert notice["labels"]["severity"] == "warning"
    assert re.match(r"[\d.]+% of mini-batches on \S+ at 127\.0\.0\.1:\d+ are padded", notice["annotations"]["summary"])
    assert notice["annotations"]["runbook"] == "docs/runbooks.md#batonpaddedsequencelengthhigh"
    wait_for(received, "BatonPaddedSequenceLengthHigh", "resolved", 300)
    print(f"{fired:.1f} s from the first long prompt to the webhook, {time.monotonic() - began:.1f} s until resolved")


def test_neither_metrics_nor_status_hold_text_of_prompts(real_run: RealRun) -> None:
    pages = [get(real_run.url + path) for path in ("/metrics", "/status", "/history", "/healthz")]
    rows = (real_run.folder / "rows.jsonl").read_text().splitlines()
    prompts = [json.loads(row)["prompt"][0]["content"] for row in rows]
    words = {" ".join(prompt.split()[at : at + 3]) for prompt in prompts for at in range(len(prompt.split()) - 2)}
    assert len(words) > 10
    assert [part for part in words for page in pages if part in page] == []


ROW = re.compile(r"^\| `(.+?)`.* \| (every|loopback|the node's) \| (\d+)( each)? \| .+ \|$", re.MULTILINE)
"""A row of the table of ports: what a command line holds, the interface, the number of ports, and of what."""


def test_a_run_listens_where_the_table_of_ports_says_and_nowhere_else(real_run: RealRun) -> None:
    rows = ROW.findall((ROOT / "SECURITY.md").read_text().partition("## Ports")[2])
    passing = {"ray::IDLE"}  # what Ray keeps for later, for a while
    wanted = {(name, at) for name, at, *_ in rows if name not in passing and at != "the node's"}

    def wrong() -> list[str]:
        """Ports that are not in the table, and rows of the table without a port."""
        found, processes = ports(real_run, [name for name, *_ in rows])
        known: Counter[tuple[str, str]] = Counter()
        for name, at, number, each in rows:
            known[name, at] += int(number) * (processes[name] if each else 1)
            known[name, "loopback"] += known[name, at]  # where this machine has no other address
        more = [f"{row}: {number} ports" for row, number in found.items() if number > known[row]]
        is_seen = any(at == "the node's" for _, at in found) and not other_rays(real_run)
        missing = wanted - found.keys() if is_seen else set()
        return more + [f"{row}: no port" for row in missing]

    # What starts just now is still called by what it was before, for a moment.
    until(lambda: not wrong(), 60, wrong)


def other_rays(real_run: RealRun) -> set[int]:
    """Raylets of others on this machine: some programs of Ray have ports of fixed numbers, which only one Ray gets."""
    own = {process.pid for process in real_run.driver.children(recursive=True)}
    return {process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"} - own


def ports(real_run: RealRun, names: list[str]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """The ports on which a run listens, by a process's name in the table and the interface; the number of processes."""
    found, processes = Counter[tuple[str, str]](), Counter[str]()
    own_address = {address.address for address in psutil.net_if_addrs().get("lo", [])}
    for process in (real_run.driver, *real_run.driver.children(recursive=True)):
        try:
            words, sockets = " ".join(process.cmdline()), process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
        name = next((name for name in names if name in f"{words} "), words)
        processes[name] += 1
        for ip in [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]:
            at = "every" if ip in ("0.0.0.0", "::") else "loopback" if ip in own_address else "the node's"
            found[name, at] += 1
    return found, processes
