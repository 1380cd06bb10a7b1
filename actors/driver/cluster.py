"""Starts Ray or connects to a cluster, and creates the actors of the run."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.buffer.actor import BufferActor
from actors.calls import in_a_line
from actors.cuda import refuse_unusable_cuda
from actors.deaths import WATCHING
from actors.driver.local_ray import is_failed_start, start_local_ray
from actors.driver.node_check import RunFiles, check_nodes
from actors.driver.placement import (
    buffer_options,
    engine_bundle,
    engine_index,
    engine_options,
    gpus_each,
    nodes,
    rank_options,
    refuse_foreign_labels,
    refuse_too_few_gpus,
    reserve,
    run_bundles,
)
from actors.driver.signals import run_beside, when_stuck
from actors.engine.vllm_arguments import SCRATCH, engine_env
from actors.generator.actor import Generator
from actors.generator.scaling import Placed
from actors.observe.actor_logs import log_env
from actors.observe.metrics_hub import MetricsHub
from actors.scorers.actor import actor_names, place_scorers, workers
from actors.scorers.frozen_model import actor_name, ask_role, place_roles
from actors.trainer.actor import SENDING, TrainerRank
from actors.trainer.group import TrainerGroup
from actors.watchdog import MARK, start_watchdog
from service.agents.session_keys import Keys
from service.config import Config
from service.environment_variables import SAFE_PATH, USER_FOLDER
from service.errors import RunFailed, UserError
from service.run.folder import ADDRESS
from service.run.inputs import Prepared
from service.run.phases import say
from service.user_code import user_folder

CONNECT_SECONDS = 10.0
"""Seconds in which the head of a cluster must accept a connection."""

HUB = "metrics-hub"
BUFFER = "buffer"


@contextmanager
def ray_session(
    config: Config, mark: str, logs: Path | None = None, stopped: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names, or start a local Ray and shut it down afterwards.

    The actors write their logs into the folder `logs`, if there is one.
    Every process of the run has `mark` in its environment, by which the watchdog ends them all when this process dies.
    If a stop signal comes while this process is stuck in Ray's start, `stopped` is called before the process ends.
    """
    os.environ[MARK] = mark

    def end(number: int) -> None:
        stopped()
        os._exit(128 + number)

    try:
        with when_stuck(end):
            _connect(config, mark, logs)
    except Exception as error:
        if not is_failed_start(error):
            raise
        raise RunFailed(f"Ray did not answer: {in_a_line(error)}") from error
    try:
        yield
    finally:
        run_beside(ray.shutdown)


class _BatonJob(JobConfig):  # type: ignore[misc]
    """A Ray job whose workers do not have the driver's folder first in their import path, where Ray would put it."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def _connect(config: Config, mark: str, logs: Path | None) -> None:
    os.environ[SAFE_PATH] = "1"
    variables = {MARK: mark, SAFE_PATH: "1", USER_FOLDER: str(user_folder())}
    settings = {
        "namespace": f"baton-{config.run.name}-{mark}",
        "job_config": _BatonJob(),
        "runtime_env": {"env_vars": variables | ({} if logs is None else log_env(logs))},
        "log_to_driver": False,
        "logging_level": "error",
    }
    if address := os.environ.get("RAY_ADDRESS"):
        check_address(address)
        os.environ.pop(SCRATCH, None)
        start_watchdog(mark)
        ray.init(**settings)
    else:
        needed_cpus = config.trainer.ranks + config.generator.max_engines
        needed_cpus += math.ceil(
            sum(config.scorers[name].cpus * len(each) for name, each in actor_names(config.scorers).items())
        )
        folder = Path(tempfile.mkdtemp(prefix="baton-"))
        os.environ[SCRATCH] = str(folder)
        start_watchdog(mark, folder)
        start_local_ray(mark, folder, logs, num_cpus=max(os.cpu_count() or 1, needed_cpus), **settings)


def check_address(address: str) -> None:
    """Raises `UserError` if nothing listens at host:port; Ray would retry for ever and ignore stop signals."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"{address}: no Ray cluster answers there ({error}); start one, or unset RAY_ADDRESS"
        ) from error


@dataclass(frozen=True)
class Cluster:
    """Handles of the run's actors: metrics hub, buffer, generators, trainer ranks, scorers, frozen roles."""

    hub: Any
    buffer: Any
    generators: tuple[Any, ...]
    trainer: TrainerGroup
    place: Callable[[int], Awaitable[Placed]]
    """Makes a further generator with this number, as soon as there is room for it."""
    scorers: tuple[Any, ...] = ()
    roles: tuple[Any, ...] = ()
    """The actors of frozen roles that the run serves."""
    shares_cores: bool = False
    """Engines and ranks compute on the CPU cores of one machine."""

    def named(self, config: Config) -> dict[str, Any]:
        """Return all actors but the generators, by name."""
        scorers = [name for names in actor_names(config.scorers).values() for name in names]
        roles = [actor_name(role) for role in config.served_roles]
        served = zip((*scorers, *roles), (*self.scorers, *self.roles), strict=True)
        return {HUB: self.hub, BUFFER: self.buffer, **dict(served), **self.trainer.named}


def place_actors(config: Config, prepared: Prepared, journal: Path, keys: Keys | None = None) -> Cluster:
    """Create every actor of the run, as soon as the cluster has room for the ranks and the engines.

    Raises:
        RunFailed: there was no room within `trainer.start_deadline`.
        UserError: this machine has too few GPUs, or a node cannot use its GPUs or lacks files of the run.
    """
    gpus = gpus_each()
    _refuse_unfit_nodes(config, has_gpu=bool(gpus))
    bundles = run_bundles(config, gpus)
    room = asyncio.run(reserve(bundles, config.trainer.start_deadline, say))
    data = (prepared.tasks_file, *prepared.eval_files.values())
    files = RunFiles.of(prepared.model_folder, data, run_folder=journal.parent)
    check_nodes(room, bundles, files)
    config_json = config.model_dump_json()
    (journal.parent / ADDRESS).unlink(missing_ok=True)  # that of an earlier part of the run
    # Prometheus scrapes the hub on the driver's node, also after a restart of the hub.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    hub = (
        ray.remote(MetricsHub)
        .options(name=HUB, num_cpus=0, max_restarts=-1, scheduling_strategy=here)
        .remote(config_json, str(journal.parent))
    )
    env, scored = engine_env(config.generator), (prepared.model_folder, prepared.tasks_file)
    scorers = place_scorers(config.scorers, config_json, *scored, env, has_gpu=bool(gpus))
    roles = place_roles(config.served_roles, config_json, env, has_gpu=bool(gpus), hub=HUB)
    buffer = (
        ray.remote(BufferActor)
        .options(name=BUFFER, **buffer_options(config))
        .remote(
            config_json, prepared.vocab_size, str(prepared.tasks_file), str(journal), HUB, prepared.routing, workers
        )
    )

    def generator(number: int, of: PlacementGroup, bundle: int, max_restarts: int) -> Any:
        name, paths = f"generator-{number}", (str(prepared.model_folder), str(prepared.tasks_file))
        options = engine_options(config, gpus, of, bundle)
        actor = ray.remote(concurrency_groups={WATCHING: 1})(Generator).options(
            name=name, max_restarts=max_restarts, **options
        )
        return actor.remote(name, config_json, *paths, BUFFER, HUB, keys, number, str(prepared.base), ask_role)

    async def place(number: int) -> Placed:
        own = [engine_bundle(config, gpus)]
        of = await reserve(own, config.generator.start_deadline, lambda missing: None)
        try:
            await asyncio.to_thread(check_nodes, of, own, files)
            return Placed(generator(number, of, 0, max_restarts=0), of)
        except ValueError as error:
            remove_placement_group(of)
            raise RunFailed(f"generator-{number} has not ended yet: {error}") from error
        except BaseException:  # also when fewer are asked for meanwhile
            remove_placement_group(of)
            raise

    engines = range(config.generator.min_engines)
    generators = tuple(generator(n, room, engine_index(config, n), max_restarts=-1) for n in engines)
    trainer, shares_cores = place_trainer(config, gpus, room, HUB), not gpus and len(nodes()) == 1
    return Cluster(hub, buffer, generators, trainer, place, scorers, roles, shares_cores)


def _refuse_unfit_nodes(config: Config, has_gpu: bool) -> None:
    """Refuse settings that the nodes can never fulfil. A cluster may grow later, but a single machine does not.

    Raises:
        UserError: the transport of weights needs GPUs and there are none, or this machine has too few GPUs or
        other labels.
    """
    if config.weights.transport != "memory" and not has_gpu:
        how = f"weights.transport: {config.weights.transport}"
        raise UserError(f"{how} sends weights from GPU to GPU, but Ray has no GPU; use memory")
    if "RAY_ADDRESS" in os.environ:
        return
    refuse_foreign_labels(config, nodes())
    if has_gpu:
        on_this_machine = int(ray.cluster_resources()["GPU"])
        refuse_unusable_cuda(on_this_machine)
        refuse_too_few_gpus(config, on_this_machine)


def place_trainer(config: Config, gpus: int, room: PlacementGroup, hub: str | None) -> TrainerGroup:
    """Create the trainer's ranks, which report to the metrics hub, if there is one."""
    config_json = config.model_dump_json()
    actor = ray.remote(concurrency_groups={SENDING: 1, WATCHING: 1})(TrainerRank)
    ranks = [
        actor.options(**rank_options(config, gpus, room, rank)).remote(config_json, rank, hub, gpus > 0)
        for rank in range(config.trainer.ranks)
    ]
    return TrainerGroup.of(config, ranks)
