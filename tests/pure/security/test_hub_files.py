"""The metrics hub answers only to its host's names."""

import socket

import aiohttp
import pytest

from actors.observe import hub_port
from actors.observe.metrics_hub import MetricsHub
from service.config import load_config


def hub_on(host: str) -> MetricsHub:
    return MetricsHub(load_config([], ["metrics.port=0", f"metrics.host={host}"]).model_dump_json())


async def status_of(url: str, headers: dict[str, str] | None = None) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status", headers=headers) as answer:
        return answer.status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9400", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:9400", 200),
        ("10.244.1.7:9400", 200),
        (f"{socket.gethostname()}:9400", 200),
        ("evil.example", 421),
        ("localhost.evil.example:9400", 421),
        ("127.0.0.1.evil.example", 421),
        ("[", 421),
    ],
)
async def test_a_name_that_is_none_of_this_host_is_refused(
    host: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_port, "full_name", lambda: "node.cluster.example")
    hub = hub_on("127.0.0.1")
    url = await hub.start()
    assert await status_of(url, {"Host": host}) == status
    assert await status_of(url, {"Host": "node.cluster.example:9400"}) == 200
    await hub.stop()
