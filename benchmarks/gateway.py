"""What the gateway of agents adds to a call: 64 clients call an endpoint directly and through the gateway in turns.

    python -m benchmarks.gateway

Gateway, endpoint and clients are three processes. The endpoint answers at once, with 4 KiB; a request has 16 KiB.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from typing import Any

import aiohttp
import numpy as np
import uvloop
from aiohttp import web

from service.agents.gateway import Gateway
from service.agents.sessions import session_key
from service.rollout.run_secret import RunSecret
from service.types import TrajectoryId

SESSIONS, CALLS, PAUSE = 64, 60, 0.25
SECRET = RunSecret(b"a benchmark")
REQUEST, ANSWER = b"x" * (16 << 10), b"y" * (4 << 10)


async def be_endpoint(told: Any) -> None:
    """Answer every request at once."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=ANSWER)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    told.put("http://{}:{}".format(*runner.addresses[0][:2]))
    await asyncio.Event().wait()


async def be_gateway(told: Any, endpoint: str) -> None:
    """Serve one generator."""

    async def continues(of: TrajectoryId) -> bool:
        return True

    gateway = Gateway(SECRET, continues, 60.0)
    told.put(await gateway.start("127.0.0.1", 0))
    while True:
        gateway.serves("generator-0", endpoint)
        await asyncio.sleep(1.0)


async def measured(direct: str, through: str) -> dict[str, float]:
    """Milliseconds of a call, and of what the gateway adds."""
    seconds: dict[str, list[float]] = {direct: [], through: []}

    async def agent(http: aiohttp.ClientSession, number: int) -> None:
        headers = {"Authorization": f"Bearer {session_key(SECRET, f'{number}-0-0')}"}
        await asyncio.sleep(PAUSE * number / SESSIONS)
        for turn in range(2 * CALLS):
            url = (direct, through)[(turn + number) % 2]
            began = time.perf_counter()
            async with http.post(f"{url}/v1/chat/completions", data=REQUEST, headers=headers) as answer:
                await answer.read()
            if turn > 1:  # the first call looks for the session
                seconds[url].append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(agent(http, number) for number in range(SESSIONS)))
    cuts = {
        name: np.percentile(seconds[url], (50, 99)) * 1e3 for name, url in (("direct", direct), ("through", through))
    }
    cuts["added"] = cuts["through"] - cuts["direct"]
    return {f"{name}_p{cut}_ms": round(float(of[k]), 2) for name, of in cuts.items() for k, cut in enumerate((50, 99))}


def _run(part: Any, *arguments: Any) -> None:
    uvloop.run(part(*arguments))  # as the actors of Ray do


def main() -> None:
    """Measure, and print JSON."""
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    parts, addresses = [], list[str]()
    for part in (be_endpoint, be_gateway):
        parts.append(context.Process(target=_run, args=(part, told, *addresses), daemon=True))
        parts[-1].start()
        addresses.append(told.get(timeout=60))
    figures = {"sessions": SESSIONS} | asyncio.run(measured(*addresses))
    for process in parts:
        process.terminate()
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
