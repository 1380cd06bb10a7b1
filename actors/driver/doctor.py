"""`baton doctor`: measures every node of a Ray cluster, or this machine, and prints the faults."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from service.doctor.facts import Facts, Places, measure
from service.doctor.findings import findings
from service.errors import UserError
from service.run.phases import phase, say
from service.store.objects import open_store

SECONDS = 30.0
"""Maximum seconds to wait for the answers of all nodes."""


def doctor(arguments: argparse.Namespace) -> int:
    """Print a line for each fault; returns 1 if there is a fault, else 0.

    Raises:
        UserError: no cluster answers at the address.
    """
    address = arguments.address or os.environ.get("RAY_ADDRESS")
    folder, store = arguments.folder.absolute(), arguments.store
    if store is not None:
        open_store(store, create=True)  # so that a wrong address is refused once, before Ray starts
    with phase("measuring the nodes of the cluster" if address else "measuring this machine"):
        machines, silent = _of_cluster(address, folder, store) if address else ([(look(folder, store), 0.0)], [])
    found = [*silent, *findings(machines)]
    for line in found:
        say(line)
    say(f"{_count(len(machines), 'machine')}, {_count(len(found), 'fault')}")
    return int(bool(found))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def look(folder: Path, store: str | None) -> Facts:
    """Measure the machine on which this function runs, the disk of `folder` (where run folders will be), and the access
    to the object store at the address `store` (None: no store)."""
    return measure(Places(folder), None if store is None else open_store(store, create=True).sizes)


def _of_cluster(address: str, folder: Path, store: str | None) -> tuple[list[tuple[Facts, float]], list[str]]:
    """Return the facts of each node, with the seconds by which its clock is behind this machine's, and a line for each
    node that does not answer, or whose measurement fails.

    Raises:
        UserError: no cluster answers.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads this variable when it is imported
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.calls import in_a_line
    from actors.driver.ray_session import TOKEN_HINT, check_address

    check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise UserError(f"--address {address}: {in_a_line(error)}; {TOKEN_HINT}") from error
    try:
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        remote: Any = ray.remote(look)
        asked = {
            remote.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                folder, store
            ): where
            for node, where in nodes.items()
        }
        found, silent, deadline = list[tuple[Facts, float]](), list[str](), time.monotonic() + SECONDS
        while asked:
            ready, _ = ray.wait(list(asked), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                silent += [f"{where}: no answer within {SECONDS:.0f} s: is Ray up there?" for where in asked.values()]
                break
            where = asked.pop(ready[0])
            try:
                facts: Facts = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                silent.append(f"{where}: did not answer: {in_a_line(error)}")
                continue
            found.append((facts, time.time() - facts.clock))
        return found, silent
    finally:
        ray.shutdown()
