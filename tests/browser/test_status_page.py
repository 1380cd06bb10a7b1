"""The status page in a real headless Chromium: painted soon, without errors, readable on a phone and a desktop."""

import asyncio
import base64
import itertools
import json
import math
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from actors.metrics_hub import MetricsHub
from service.config import Config, load_config
from service.metrics import Boundaries, Metrics

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian package of this name)"),
]

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


class Browser:
    """A page in Chromium, spoken to over its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], 20)
        del self._answers[number]
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while not await self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true; {self.complaints}"
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers[event["id"]].set_result(event)
            elif event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(event["params"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("warning", "error"):
                self.complaints.append(json.dumps(event["params"]["entry"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + 30
        while not port_file.exists() or "\n" not in port_file.read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "chromium.log").read_text()
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                page = next(target for target in await answer.json() if target["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await opened.call(f"{domain}.enable")
                yield opened
                await opened.close()
    finally:
        process.terminate()
        process.wait(20)


@asynccontextmanager
async def run_under_way(steps: int) -> AsyncIterator[tuple[str, MetricsHub]]:
    hub = MetricsHub(load_config([], ["metrics.port=0"]).model_dump_json())
    url = await hub.start()
    for source in ("buffer/buffer", "driver/driver", "generator/generator-0"):
        await hub.push(source, Metrics(*source.split("/"), Boundaries.of(Config())).snapshot())
    for step in range(1, steps + 1):
        await hub.put_status("step", a_step(step))
    policy = {"epoch": 1, "step": steps}
    run = {"name": "<b>quick</b>", "state": "training", "max_steps": 100, "policy_version": policy, "generators": 1}
    await hub.put_status("run", run)
    wait = {"who": "trainer", "reason": "groups", "detail": "11 of 16", "since": time.time() - 3}
    tokens = {"trained": 90000, "open": 1200, "stale": 40}
    groups = {"open": 7, "complete": 11, "leased": 0}
    await hub.put_status("buffer", {"groups": groups, "tokens": tokens, "waits": [wait], "accepted_tokens": 91240})
    try:
        yield url, hub
    finally:
        await hub.stop()


def a_step(step: int) -> dict[str, float]:
    return {
        "trainer/global_step": step,
        "reward/avg_raw_reward": 0.25 + 0.6 * (1 - math.exp(-step / 30)),
        "generate/batch_padded_seq_len": 50 + step % 7,
        "generate/avg_num_tokens": 17.0,
        "async/staleness_mean": 0.8,
        "async/staleness_max": 2.0,
        "timing/step": math.nan if step == 5 else 0.5,
        "timing/wait_for_generation_buffer": 0.1,
        "policy/policy_loss": 0.001,
    }


@pytest.mark.parametrize("size", SIZES)
def test_the_page_shows_the_run_soon_without_errors_at_both_sizes(size: str, tmp_path: Path) -> None:
    width, height = SIZES[size]

    async def scenario() -> None:
        async with run_under_way(60) as (url, hub), browser(tmp_path) as page:
            await page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                mobile=size == "phone",
            )  # fmt: skip
            await page.call("Page.navigate", url=url)
            await page.until("document.querySelector('#state')?.textContent === 'training'")
            assert await page.value("document.querySelector('#name').textContent") == "<b>quick</b>"
            assert "step 60 of 100" in await page.value("document.querySelector('#facts').textContent")
            assert await page.value("document.querySelectorAll('.chart svg path').length") == 5
            assert await page.value("document.querySelectorAll('#bar div').length") == 3
            assert "groups: 11 of 16" in await page.value("document.querySelector('#waits').textContent")
            assert await page.value("document.querySelectorAll('#actors tr').length") == 3
            paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            await page.until(f"({paint}) > 0")
            assert await page.value(paint) < 1000
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert await page.value(wide) == 0, "the page scrolls sideways"
            small = "Math.min(...[...document.querySelectorAll('td, dd, dt, h2, .note')]"
            assert await page.value(small + ".map(e => parseFloat(getComputedStyle(e).fontSize)))") >= 12

            await hub.put_status("step", a_step(61))
            await page.until("document.querySelector('#charts').textContent.includes('61')")
            shot = await page.call("Page.captureScreenshot", captureBeyondViewport=True)
            (tmp_path / f"{size}.png").write_bytes(base64.b64decode(shot["data"]))
            assert (tmp_path / f"{size}.png").stat().st_size > 20_000
            assert page.complaints == []

    asyncio.run(scenario())


def test_the_page_says_so_when_the_run_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with run_under_way(3) as (url, hub), browser(tmp_path) as page:
            await page.call("Page.navigate", url=url)
            await page.until("document.querySelector('#state')?.textContent === 'training'")
            await hub.stop()
            await page.until("document.querySelector('#state').textContent === 'not answering'")

    asyncio.run(scenario())
