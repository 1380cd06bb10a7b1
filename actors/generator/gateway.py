"""The actor that serves one address for all agents of a run, on the driver's node; Ray restarts it at the same port."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any, NamedTuple

import ray

from actors.calls import ACTOR_FAILED, call, resolve_actor
from actors.deaths import Supervised
from actors.observe.actor_logs import keep_log
from actors.observe.hub_port import listening_at
from service.agents.agents import GatewayRoute, is_loopback, named_errors, warn_if_open
from service.agents.gateway import Gateway
from service.agents.listening import address_of
from service.config.rollout import AgentsConfig
from service.rollout.run_secret import RunSecret
from service.types import TrajectoryId

GATEWAY = "gateway"
ANNOUNCE_SECONDS = 1.0
"""Seconds between two announcements of a generator. After them a restarted gateway knows all generators."""
ASK_SECONDS = 10.0
"""Maximum seconds to wait for an answer of the gateway or the buffer; then it is asked again."""
EXIT_SECONDS = 1.0
"""Seconds until a gateway that cannot listen ends, so that Ray starts it again."""


class GatewayAddress(NamedTuple):
    """Where the gateway of a run is."""

    url: str
    node: str
    """Id of the driver's node."""

    @staticmethod
    def choose(config: AgentsConfig) -> tuple[GatewayAddress, int]:
        """Choose the address and the port on this node.

        Raises:
            UserError: the port is taken, or the host is not an address of this machine.
        """
        with named_errors(config), listening_at(config.host, config.port) as listening:
            host, port = listening.getsockname()[:2]
        on_all = host in ("0.0.0.0", "::")  # other hosts get an address at which they can reach it
        url = address_of(ray.util.get_node_ip_address() if on_all else host, port)
        return GatewayAddress(url, ray.get_runtime_context().get_node_id()), port

    def route(self) -> GatewayRoute:
        """The route to a generator on this node."""
        if ray.get_runtime_context().get_node_id() == self.node:
            return GatewayRoute(self.url, "127.0.0.1")
        if is_loopback(self.url):
            return GatewayRoute("", "127.0.0.1")
        return GatewayRoute(self.url, ray.util.get_node_ip_address())

    async def announce(self, generator: str, address: str) -> None:
        """Tell the gateway again and again, until cancelled, that a generator serves at this address."""
        gateway = resolve_actor(GATEWAY)
        while True:
            with suppress(*ACTOR_FAILED):  # it restarts, or is slow
                await call(gateway.serves, generator, address, who="the gateway", within=ASK_SECONDS)
            await asyncio.sleep(ANNOUNCE_SECONDS)


class GatewayActor(Supervised):
    """Ray actor around `service.agents.gateway.Gateway`."""

    def __init__(self, config_json: str, secret: RunSecret, port: int, buffer: str) -> None:
        """`port`: the port that was chosen for the run; `buffer`: the name of the buffer's actor."""
        keep_log(GATEWAY)
        self._config, self._port = AgentsConfig.model_validate_json(config_json), port
        self._buffer: Any = resolve_actor(buffer)
        self._gateway = Gateway(secret, self._continues, self._config.deadline)
        self._listening = asyncio.ensure_future(self._gateway.start(self._config.host, port))
        self._listening.add_done_callback(self._end_if_failed)

    async def start(self) -> None:
        """Wait until the gateway listens."""
        with named_errors(self._config):
            await asyncio.shield(self._listening)
        warn_if_open(self._listening.result())

    async def serves(self, generator: str, address: str) -> None:
        """Note that a generator serves its sessions at this address."""
        self._gateway.serves(generator, address)

    async def _continues(self, trajectory: TrajectoryId) -> bool:
        try:
            return bool(await call(self._buffer.continues, trajectory, who="the buffer", within=ASK_SECONDS))
        except ACTOR_FAILED:  # it restarts, or is slow: the request goes on waiting
            return True

    def _end_if_failed(self, listening: asyncio.Future[str]) -> None:
        if not listening.cancelled() and listening.exception() is not None:
            asyncio.get_running_loop().call_later(EXIT_SECONDS, os._exit, 1)
