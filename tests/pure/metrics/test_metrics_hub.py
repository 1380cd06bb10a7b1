"""The hub's HTTP face, without Ray."""

import asyncio
import json
import math
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
import ray

from actors.observe import hub_port
from actors.observe.metrics_hub import MetricsHub, run_target
from service.cli.status import fetch_status
from service.cli.status_view import status_lines
from service.config import Config, MetricsConfig, load_config
from service.errors import UserError
from service.observe.merged_metrics import HISTORY_KEYS, Hub
from service.observe.metrics import AlertThresholds, Metrics
from service.observe.pushed import SILENT_SECONDS
from service.run.folder import read_address
from tests.pure.buffer.world import TurnedClock

THRESHOLDS = AlertThresholds.of(Config())
Listening = tuple[MetricsHub, str]
IPV6 = Path("/proc/net/if_inet6")
"""Lists the IPv6 addresses of this machine, if it has any."""


def hub_on(port: int) -> MetricsHub:
    return MetricsHub(load_config([], [f"metrics.port={port}"]).model_dump_json())


async def get(url: str, **headers: str) -> tuple[str, bytes]:
    def read() -> tuple[str, bytes]:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.headers["Content-Type"], answer.read()

    return await asyncio.to_thread(read)


@pytest_asyncio.fixture(loop_scope="function")
async def listening() -> AsyncIterator[Listening]:
    """A hub that listens, and its address."""
    hub = hub_on(0)
    yield hub, await hub.start()
    await hub.stop()


async def test_metrics_status_and_health_are_served_on_one_port(listening: Listening) -> None:
    hub, url = listening
    assert await hub.start() == url
    metrics = Metrics("trainer", "trainer-0", THRESHOLDS)
    metrics.set("baton_policy_version", 3)
    await hub.push("trainer/trainer-0", metrics.snapshot(), [("run", {"name": "r", "state": "training"})])
    kind, page = await get(f"{url}/metrics")
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert b'baton_policy_version{ident="trainer-0",role="trainer"} 3.0\n' in page
    status = await asyncio.to_thread(fetch_status, url)
    assert status["run"] == {"name": "r"} and status["policy_version"] == {"incarnation": 0, "step": 0}
    assert status["state"] == "training" and status["actors"][0]["ident"] == "trainer-0"
    assert json.loads((await get(f"{url}/healthz"))[1]) == {"ok": True, "silent": []}


def test_the_status_has_the_sessions_of_agents_over_all_generators() -> None:
    clock = TurnedClock()
    hub = Hub(clock)
    assert hub.status()["agents"] == {}
    generators = [Metrics("generator", f"generator-{number}", THRESHOLDS) for number in range(2)]
    for seconds in range(3):
        for number, metrics in enumerate(generators):
            metrics.set_all("baton_agent_sessions", "state", {"calling": 2, "idle": number, "finished": 7 * seconds})
            metrics.set_all("baton_agent_oldest_session_seconds", "state", {"calling": 0.0, "idle": 2400.0 * number})
            hub.push(f"generator/generator-{number}", metrics.snapshot())
        clock.now += 1
    agents = hub.status()["agents"]
    assert agents["sessions"] == {"calling": 4, "idle": 1, "finished": 28}
    assert agents["oldest_seconds"] == {"calling": 0.0, "idle": 2400.0}
    said = "sessions: 4 calling, 1 idle, 28 finished; the oldest: 40 min 0 s (idle)"
    assert any(said in line for line in status_lines(hub.status(), 120))
    clock.now += SILENT_SECONDS
    assert hub.status()["agents"] == {}


async def test_a_run_that_got_the_address_of_a_killed_one_does_not_answer_for_it(listening: Listening) -> None:
    hub, url = listening
    snapshot = Metrics("trainer", "trainer-0", THRESHOLDS).snapshot()
    await hub.push("trainer/trainer-0", snapshot, [("run", {"folder": "/runs/second"})])
    address = url.removeprefix("http://")
    target, killed = run_target(address, "/runs/second"), run_target(address, "/runs/first")
    named = {name: target["labels"][name] for name in ("instance", "run", "folder")}
    assert named == {"instance": f"second at {address}", "run": "second", "folder": "/runs/second"}
    assert b"baton_actor_up" in (await get(f"{url}/metrics?run={target['labels']['__param_run']}"))[1]
    with pytest.raises(HTTPError, match="404"):
        await get(f"{url}/metrics?run={killed['labels']['__param_run']}")


async def test_a_start_and_pushes_at_the_same_time_open_the_port_once() -> None:
    hub = hub_on(0)
    snapshot = Metrics("trainer", "t", THRESHOLDS).snapshot()
    url, *_ = await asyncio.gather(hub.start(), *(hub.push("trainer/t", snapshot) for _ in range(5)))
    second = hub_on(port := int(url.rpartition(":")[2]))
    with pytest.raises(UserError, match=rf"^metrics\.port: port {port} on 127\.0\.0\.1 is in use"):
        await second.push("trainer/t", snapshot)
    await second.push("trainer/t", snapshot)
    await hub.stop()


@pytest.mark.parametrize(
    ("host", "announced"),
    [
        ("0.0.0.0", None),
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        pytest.param("::1", "::1", marks=pytest.mark.skipif(not IPV6.is_file() or not IPV6.read_text(), reason="IPv4")),
    ],
)
async def test_a_hub_that_listens_on_all_interfaces_announces_the_address_of_its_node(
    host: str, announced: str | None
) -> None:
    hub = MetricsHub(load_config([], [f"metrics.host={host}", "metrics.port=0"]).model_dump_json())
    url = await hub.start()
    try:
        assert urlsplit(url).hostname == (announced or ray.util.get_node_ip_address())
        await get(f"{url}/status")
    finally:
        await hub.stop()


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        *((name, True) for name in ("localhost:9400", "LOCALHOST", "[::1]:9400", "10.244.1.7:9400")),
        *((name, True) for name in (f"{socket.gethostname()}:9400", "node.cluster.example:9400")),
        *((name, False) for name in ("evil.example", "localhost.evil.example:9400", "127.0.0.1.evil.example", "[")),
    ],
)
async def test_a_request_under_a_name_that_is_none_of_this_hosts_is_refused(
    name: str, is_own: bool, monkeypatch: pytest.MonkeyPatch, listening: Listening
) -> None:
    monkeypatch.setattr(hub_port, "full_name", lambda: "node.cluster.example")
    _, url = listening
    with nullcontext() if is_own else pytest.raises(HTTPError, match="421"):
        await get(f"{url}/status", Host=name)


def test_a_host_that_is_not_this_machines_is_one_clear_error() -> None:
    hub = MetricsHub(load_config([], ["metrics.host=192.0.2.1"]).model_dump_json())
    with pytest.raises(UserError, match=r"^metrics\.host: cannot listen on 192\.0\.2\.1:9400"):
        asyncio.run(hub.start())


@pytest.mark.parametrize("port", [None, 0])
async def test_a_restarted_hub_serves_at_the_same_address_and_at_another_one_if_it_was_taken_meanwhile(
    port: int | None, tmp_path: Path
) -> None:
    config = Config(metrics=MetricsConfig(port=port)).model_dump_json()

    async def served() -> str:
        """What `baton status` shows for the run; the hub is then gone."""
        hub = MetricsHub(config, str(tmp_path))
        await hub.push("trainer/t", Metrics("trainer", "t", THRESHOLDS).snapshot(), [("run", {"state": "training"})])
        url = read_address(tmp_path)
        assert (await asyncio.to_thread(fetch_status, url))["state"] == "training"
        await hub.stop()
        return url

    first = await served()
    assert await served() == first
    with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
        assert await served() != first


@pytest.mark.parametrize("number", [math.nan, math.inf])
async def test_a_number_that_is_not_finite_is_null_in_status_and_history_as_json_has_no_other(
    number: float, listening: Listening
) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    hub, url = listening
    snapshot = Metrics("trainer", "t", THRESHOLDS).snapshot()
    step = {"trainer/global_step": 1, HISTORY_KEYS[0]: number, "policy/loss": number}
    buffer = {"accepted_tokens": 3, "groups": {"open": number}}
    await hub.push("trainer/t", snapshot, [("step", step), ("buffer", buffer)])
    status = json.loads((await get(f"{url}/status"))[1], parse_constant=refuse)
    assert status["step"]["policy/loss"] is None and status["buffer"]["groups"]["open"] is None
    history = json.loads((await get(f"{url}/history"))[1], parse_constant=refuse)
    assert history["columns"][HISTORY_KEYS[0]] == [None]
    assert any("reward -" in line for line in status_lines(status))
