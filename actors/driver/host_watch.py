"""Watches the hosts of a run: which actors each host holds, and which hosts join, leave or are drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

import ray
from ray._private.state import state as cluster_state

from service.config.tree import MARKET
from service.errors import RunFailed

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Seconds between two checks of the cluster."""


class ClusterHost(NamedTuple):
    """A living host of the cluster."""

    name: str
    """The host's address, followed by its kind (such as `spot`) if the kind is known."""
    parts: tuple[str, ...]
    """The parts of the run on this host, such as `generator-0`."""
    ends_at: int | None = None
    """The Unix time in ms at which a drained host ends; 0: unknown; None: the host is not drained."""


def hosts() -> dict[str, ClusterHost]:
    """Return the living hosts, by the id of the host's Ray node, in the order of the hosts' addresses."""
    if not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    parts = {context.get_node_id(): ["driver"]}
    for actor in cluster_state.actor_table(None, ray.JobID.from_hex(context.get_job_id()), "ALIVE").values():
        parts.setdefault(actor["Address"]["NodeID"], []).append(actor["Name"] or actor["ActorClassName"])
    found, draining = {}, cluster_state.get_draining_nodes()
    for node in sorted(ray.nodes(), key=lambda node: str(node["NodeManagerAddress"])):
        if node["Alive"]:
            kind = f" ({node['Labels'][MARKET]})" if MARKET in node["Labels"] else ""
            held = (*sorted(parts.get(node["NodeID"], ())),)
            found[node["NodeID"]] = ClusterHost(node["NodeManagerAddress"] + kind, held, draining.get(node["NodeID"]))
    return found


class HostWatch:
    """Prints at the start which parts of the run (actors and driver) run on each host; later, which hosts join or
    leave. After each check it calls `follow` with the end time of each drained node, by the node's id
    (`ClusterHost.ends_at`)."""

    def __init__(
        self,
        say: Callable[[str], None],
        follow: Callable[[dict[str, int]], None],
        look: Callable[[], dict[str, ClusterHost]] = hosts,
    ) -> None:
        self._say, self._follow, self._look = say, follow, look
        self._hosts: dict[str, ClusterHost] = {}

    async def begin(self) -> None:
        """Print which parts run on each host, if there are several."""
        self._hosts = await asyncio.to_thread(self._look)
        if len(self._hosts) > 1:
            for host in self._hosts.values():
                self._say(f"host {host.name}: {', '.join(host.parts) or 'nothing of this run'}")

    async def run(self) -> None:
        """Print changes, and pass the drained nodes to `follow`, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                found = await asyncio.to_thread(self._look)
            except Exception as error:  # noqa: BLE001 - Ray's control store does not answer, and may raise any error
                log.debug("the hosts are not known: %s", error)
            else:
                self.changed(found)
                self._follow({node: host.ends_at for node, host in found.items() if host.ends_at is not None})

    def changed(self, found: dict[str, ClusterHost]) -> None:
        """Print which hosts have left or joined since the last check. `RunFailed` if the driver's host has left."""
        for node in self._hosts.keys() - found.keys():
            held = ", ".join(self._hosts[node].parts)
            self._say(f"host {self._hosts[node].name} is gone" + (f"; it held {held}" if held else ""))
            if "driver" in self._hosts[node].parts:
                raise RunFailed("Ray has lost the node of the driver, without which the run cannot go on")
        for node in found.keys() - self._hosts.keys():
            self._say(f"host {found[node].name} has joined")
        self._hosts = found
