"""Creates the actors of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.buffer.actor import BufferActor
from actors.calls import call, started
from actors.deaths import WATCHING
from actors.driver.node_check import RunFiles, check_nodes
from actors.driver.placement import (
    buffer_options,
    engine_bundle,
    engine_index,
    engine_options,
    gpus_each,
    rank_options,
    refuse_too_few_gpus,
    reserve,
    run_bundles,
)
from actors.engine.vllm_arguments import engine_env
from actors.generator.actor import Generator
from actors.generator.gateway import GATEWAY, GatewayActor, GatewayAddress
from actors.generator.scaling import Placed
from actors.observe.metrics_hub import MetricsHub
from actors.scorers.actor import all_up, place_scorers
from actors.scorers.workers import asking
from actors.trainer.actor import SENDING, TrainerRank
from actors.trainer.group import TrainerGroup
from actors.weights.policy_tensors import PolicySize
from service.config import Config
from service.errors import RunFailed, UserError
from service.rollout.run_secret import RunSecret
from service.run.folder import ADDRESS
from service.run.phases import say
from service.run.preparing.inputs import Prepared

HUB = "metrics-hub"
BUFFER = "buffer"


@dataclass(frozen=True)
class Cluster:
    """Handles of the run's actors: metrics hub, buffer, generators, trainer ranks, scorers."""

    hub: Any
    buffer: Any
    generators: tuple[Any, ...]
    trainer: TrainerGroup
    place: Callable[[int], Awaitable[Placed]]
    """A function that creates another generator, with the given number, when there is room."""
    scorers: Mapping[str, Any] = field(default_factory=dict)
    starting: Mapping[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """Functions that wait until other actors are ready, by the actors' name in messages."""
    gateway: Any = None
    """The address of all agents; None in a run without agents."""

    @property
    def named(self) -> dict[str, Any]:
        """Return all actors except the generators, by name."""
        gateway = {GATEWAY: self.gateway} if self.gateway is not None else {}
        return {HUB: self.hub, BUFFER: self.buffer, **gateway, **self.scorers, **self.trainer.named}


def place_actors(config: Config, prepared: Prepared, journal: Path, secret: RunSecret | None = None) -> Cluster:
    """Create every actor of the run when the cluster has room for ranks and engines. `RunFailed` if it has no room
    within `run.start_deadline`; `UserError` if there are too few or unusable GPUs, or a node lacks files."""
    gpus = gpus_each()
    _refuse_unfit_nodes(config, has_gpu=bool(gpus))
    bundles = run_bundles(config, gpus)
    room = asyncio.run(reserve(bundles, config.run.start_deadline, say))
    data = (prepared.tasks_file, *prepared.eval_files.values())
    # each weight with its two moments in float32
    saved = 12 * PolicySize.of_folder(prepared.model_folder, config.model.lora).elements
    saved *= config.trainer.checkpoint_every > 0
    files = RunFiles.of(prepared.model_folder, data, journal.parent, saved)
    check_nodes(room, bundles, files)
    config_json = config.model_dump_json()
    (journal.parent / ADDRESS).unlink(missing_ok=True)  # the address of an earlier part of the run
    # Prometheus scrapes the hub on the driver's node, also after a restart of the hub.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    hub = (
        ray.remote(MetricsHub)
        .options(name=HUB, num_cpus=0, max_restarts=-1, scheduling_strategy=here)
        .remote(config_json, str(journal.parent))
    )
    env, scored = engine_env(config.generator), (prepared.model_folder, prepared.tasks_file)
    scorers = place_scorers(config.scorers, config_json, *scored, env, has_gpu=bool(gpus))
    starting = {"the scorers": partial(all_up, scorers.values(), config.run.start_deadline)} if scorers else {}
    buffer = (
        ray.remote(BufferActor)
        .options(name=BUFFER, **buffer_options(config))
        .remote(config_json, prepared.vocab_size, str(prepared.tasks_file), str(journal), HUB, prepared.routing, asking)
    )

    gateway, address = None, None
    if config.endpoint is not None and secret is not None:
        address, port = GatewayAddress.choose(config.endpoint)
        options = {"name": GATEWAY, "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        own = config.endpoint.model_dump_json()
        gateway = ray.remote(GatewayActor).options(**options).remote(own, secret, port, BUFFER)
        starting["the agents' address"] = partial(started, partial(call, gateway.start, who="the gateway"))
        say(f"agents call the policy at {address.url}")

    def generator(number: int, of: PlacementGroup, bundle: int, max_restarts: int) -> Any:
        name, paths = f"generator-{number}", (str(prepared.model_folder), str(prepared.tasks_file))
        options = engine_options(config, gpus, of, bundle)
        actor = ray.remote(concurrency_groups={WATCHING: 1})(Generator).options(
            name=name, max_restarts=max_restarts, **options
        )
        return actor.remote(name, config_json, *paths, BUFFER, HUB, secret, number, str(prepared.base), address)

    async def place(number: int) -> Placed:
        own = [engine_bundle(config, gpus)]
        of = await reserve(own, config.run.start_deadline, lambda missing: None)
        try:
            await asyncio.to_thread(check_nodes, of, own, files)
            return Placed(generator(number, of, 0, max_restarts=0), of)
        except ValueError as error:
            remove_placement_group(of)
            raise RunFailed(f"generator-{number} has not ended yet: {error}") from error
        except BaseException:  # also if cancelled, because fewer are needed
            remove_placement_group(of)
            raise

    engines = range(config.generator.min_engines)
    generators = tuple(generator(n, room, engine_index(config, n), max_restarts=-1) for n in engines)
    trainer = place_trainer(config, gpus, room, HUB)
    return Cluster(hub, buffer, generators, trainer, place, scorers, starting, gateway)


def _refuse_unfit_nodes(config: Config, has_gpu: bool) -> None:
    """Refuse settings that the nodes can never fulfil. A cluster may grow later, but a single machine does not."""
    if config.weights.transport != "memory" and not has_gpu:
        how = f"weights.transport: {config.weights.transport}"
        raise UserError(f"{how} sends weights from GPU to GPU, but Ray has no GPU; use memory")
    for name, scorer in config.scorers.items():
        if has_gpu and scorer.model is not None and not scorer.gpus:
            raise UserError(f"scorers.{name}.gpus: without a GPU of its own the engine would use a rank's; give it 1")
    if has_gpu and not os.environ.get("RAY_ADDRESS"):
        refuse_too_few_gpus(config, int(ray.cluster_resources()["GPU"]))


def place_trainer(config: Config, gpus: int, room: PlacementGroup, hub: str | None) -> TrainerGroup:
    """Create the trainer's ranks; they report to the metrics hub `hub`, if it is not None."""
    config_json = config.model_dump_json()
    actor = ray.remote(concurrency_groups={SENDING: 1, WATCHING: 1})(TrainerRank)
    ranks = [
        actor.options(**rank_options(config, gpus, room, rank)).remote(config_json, rank, hub, gpus > 0)
        for rank in range(config.trainer.ranks)
    ]
    return TrainerGroup(config, ranks)
