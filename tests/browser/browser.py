"""A headless Chromium, spoken to over its debugging protocol."""

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REASON = "chromium is not installed (Debian package of this name)"

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
        answer = await asyncio.wait_for(self._answers[number], 120)
        del self._answers[number]
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not await self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true; {self.complaints}"
            await asyncio.sleep(0.05)

    async def show(self, url: str, size: str) -> None:
        width, height = SIZES[size]
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=size == "phone",
        )  # fmt: skip
        await self.call("Page.navigate", url=url)

    async def screenshot(self, file: Path) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

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


async def targets(session: aiohttp.ClientSession, port: str) -> list[dict[str, Any]]:
    """The pages that are open."""
    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
        return [target for target in await answer.json() if target["type"] == "page"]


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        port_file, deadline = folder / "DevToolsActivePort", time.monotonic() + 120
        while not port_file.exists() or "\n" not in port_file.read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "chromium.log").read_text()
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            while not (pages := await targets(session, port)):  # its port is open before its first page is
                assert time.monotonic() < deadline, (folder / "chromium.log").read_text()
                await asyncio.sleep(0.05)
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                opened = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await opened.call(f"{domain}.enable")
                yield opened
                await opened.close()
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
