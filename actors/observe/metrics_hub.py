"""The actor that serves /metrics, /status and the status page on one port. It continues when other actors die."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
import ray.exceptions
from aiohttp import web

import service
from actors.deaths import Supervised
from actors.observe.actor_logs import keep_log
from actors.observe.hub_port import for_own_names, listening_socket
from service.clock import SystemClock
from service.config import Config
from service.errors import UserError
from service.observe.bound_by import Shares
from service.observe.merged_metrics import Hub
from service.run.folder import ADDRESS, TIMELINE, read_address, write_address
from service.run.records.timeline import TimelineFiles

log = logging.getLogger(__name__)

TARGETS_SECONDS = 30.0
"""Seconds after which the nodes of the Ray cluster are listed again. (Nodes join and leave.)"""
TEXT = "text/plain; version=0.0.4; charset=utf-8"

PAGE = Path(service.__file__).parent / "observe" / "status_page.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class MetricsHub(Supervised):
    """Ray actor around `service.observe.merged_metrics.Hub`, with an HTTP server in the actor's event loop."""

    def __init__(self, config_json: str, run_folder: str | None = None) -> None:
        """Create the hub; `run_folder`: the folder for the address and the timeline, or None."""
        keep_log("metrics-hub")
        self._metrics = Config.model_validate_json(config_json).metrics
        self._folder = None if run_folder is None else Path(run_folder)
        self._hub = Hub(SystemClock())
        self._timeline = None if self._folder is None else TimelineFiles(self._folder / TIMELINE)
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._starting = asyncio.Lock()
        self._refused = False

    async def start(self) -> str:
        """Start to serve, unless the hub serves already; returns the address.

        Raises:
            UserError: the port is taken, or the host is not an address of this machine.
        """
        async with self._starting:
            if self._runner is None:
                await self._listen()
            return self._url

    async def _listen(self) -> None:
        try:
            listening = listening_socket(self._metrics, self._earlier_port())
        except UserError:
            self._refused = True
            raise
        runner = web.AppRunner(self._app(), access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        self._runner = runner
        named = self._metrics.host
        on_all = named in ("0.0.0.0", "::")  # other hosts get an address at which they can reach it
        host = ray.util.get_node_ip_address() if on_all else "127.0.0.1" if named == "localhost" else named
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        if self._folder is not None:
            write_address(self._folder, self._url)

    def _earlier_port(self) -> int | None:
        """The port at which this run was served before the hub died; None at the hub's first start."""
        if self._folder is None or not (self._folder / ADDRESS).exists():
            return None
        return urlsplit(read_address(self._folder)).port

    async def push(
        self, source: str, snapshot: bytes, reports: Sequence[tuple[str, dict[str, Any]]] = (), timeline: bytes = b""
    ) -> None:
        """Store the metrics of the process `source` (`role/ident`), its reports for the status, and its lines of the
        timeline. A restarted hub starts to serve at the first call."""
        self._hub.push(source, snapshot)
        for part, report in reports:
            self._hub.put_status(part, report)
        if timeline and self._timeline is not None:
            self._timeline.append(timeline)
        if self._runner is None and not self._refused:
            try:
                await self.start()
            except OSError as error:  # for example a full disk; the caller of `push` does not wait for the answer
                log.warning("cannot start to serve: %s", error)

    async def forget(self, source: str) -> None:
        """Forget an actor that has left for good."""
        self._hub.forget(source)

    async def binding(self) -> Shares | None:
        """Return what binds the run in the last minutes; None in the first steps."""
        return self._hub.status()["binding"]  # type: ignore[no-any-return]

    async def stop(self) -> None:
        """Close the port and the timeline."""
        if self._timeline is not None:
            self._timeline.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[for_own_names(self._metrics.host)])
        for name in ("", "status", "history", "metrics", "healthz"):
            app.router.add_get(f"/{name}", getattr(self, f"_get_{name or 'page'}"))
        return app

    async def _get_page(self, request: web.Request) -> web.Response:
        page = PAGE.read_text(encoding="utf-8")
        return web.Response(text=page, content_type="text/html", headers=PAGE_HEADERS)

    async def _get_history(self, request: web.Request) -> web.Response:
        try:
            after = int(request.query.get("after", "-1"))
        except ValueError:
            raise web.HTTPBadRequest(text="after must be a number") from None
        return web.json_response(self._hub.history(after))

    async def _get_metrics(self, request: web.Request) -> web.Response:
        folder = self._hub.status()["run"].get("folder")
        if folder is not None and request.query.get("run", folder) != folder:
            raise web.HTTPNotFound(text=f"another run is served here: {folder}")
        return web.Response(body=self._hub.page(), headers={"Content-Type": TEXT})

    async def _get_status(self, request: web.Request) -> web.Response:
        return web.json_response(self._hub.status())

    async def _get_healthz(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True, "silent": self._hub.silent()})


class ScrapeTargets:
    """Writes the addresses at which Prometheus scrapes a run."""

    def __init__(self, folder: Path, write: Callable[[list[dict[str, Any]]], None]) -> None:
        self._folder, self._write = folder, write
        self._written_at = -TARGETS_SECONDS

    async def write(self) -> None:
        """Write the targets, unless they were written less than `TARGETS_SECONDS` ago."""
        if time.monotonic() - self._written_at >= TARGETS_SECONDS:
            self._written_at = time.monotonic()
            own = run_target(read_address(self._folder).partition("//")[2], str(self._folder))
            self._write([own, *await asyncio.to_thread(ray_targets)])


def run_target(address: str, folder: str) -> dict[str, Any]:
    """Return a run's metrics address in the format of Prometheus' service discovery, labelled with the run's folder.

    Prometheus sends the folder with each scrape, and a run refuses a scrape with another run's folder. So a new run at
    a killed run's address does not answer for the killed run.
    """
    name = Path(folder).name
    labels = {"__param_run": folder, "instance": f"{name} at {address}", "run": name, "folder": folder}
    return {"targets": [address], "labels": {"__meta_baton_kind": "baton"} | labels}


def ray_targets() -> list[dict[str, Any]]:
    """Return the metrics endpoints of the Ray cluster's live nodes, in the format of Prometheus' service discovery."""
    if not ray.is_initialized():
        return []
    return [
        {
            "targets": [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"],
            "labels": {"__meta_baton_kind": "ray", "node": node["NodeManagerHostname"]},
        }
        for node in ray.nodes()
        if node["Alive"]
    ]
