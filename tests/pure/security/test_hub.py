"""The metrics hub serves on, whoever connects, and answers only to its host's names."""

import asyncio
import contextlib
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest

from actors.observe import http_guard
from actors.observe.http_guard import MAX_CONNECTIONS
from actors.observe.metrics_hub import MetricsHub
from service.config import load_config

SECONDS = 60.0


def hub_on(host: str) -> MetricsHub:
    return MetricsHub(load_config([], ["metrics.port=0", f"metrics.host={host}"]).model_dump_json())


async def status_of(url: str, headers: dict[str, str] | None = None) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status", headers=headers) as answer:
        return answer.status


async def test_connections_that_send_nothing_or_half_a_header_or_read_no_answer_do_not_stop_the_hub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_guard, "CONNECTION_SECONDS", 10 * SECONDS)
    hub = hub_on("127.0.0.1")
    url = await hub.start()
    address = urlsplit(url)
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    for said in (b"", b"GET /status HTTP/1.1\r\nHost: loc", b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        for _ in range(MAX_CONNECTIONS):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(said)
            idle.append((reader, writer))
    assert await asyncio.wait_for(status_of(url), SECONDS) == 200
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(idle[0][0].read(), SECONDS) == b""  # the oldest is cut off
    for _, writer in idle:
        writer.transport.abort()
    await hub.stop()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"POST / HTTP/1.1\r\nHost: localhost\r\n"]
)
async def test_a_connection_ends_when_its_time_is_over(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "CONNECTION_SECONDS", 0.2)
    hub = hub_on("127.0.0.1")
    address = urlsplit(await hub.start())
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(said)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), SECONDS)
    writer.close()
    await hub.stop()


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
    monkeypatch.setattr(http_guard, "full_name", lambda: "node.cluster.example")
    hub = hub_on("127.0.0.1")
    url = await hub.start()
    assert await status_of(url, {"Host": host}) == status
    assert await status_of(url, {"Host": "node.cluster.example:9400"}) == 200
    await hub.stop()
