"""Where the run lives: Ray itself, and the run's actors placed on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.buffer import BufferActor
from actors.calls import in_a_line
from actors.engine import engine_env
from actors.generator import Generator
from actors.guardian import MARK, start_guardian
from actors.metrics_hub import MetricsHub
from actors.trainer import TrainerGroup, TrainerRank
from service.config import Config
from service.errors import RunFailed
from service.prepare import Prepared

HUB = "metrics-hub"
BUFFER = "buffer"


@contextmanager
def ray_session(config: Config, mark: str, logs: Path) -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names, or start a Ray of the run's own and end it afterwards.

    Whatever the run starts carries `mark` in its environment, and ends with this process however that ends.
    """
    os.environ[MARK] = mark
    try:
        _connect(config, mark, logs)
    except (RuntimeError, ConnectionError) as error:
        (logs / "failure.txt").write_text(str(error))
        raise RunFailed(f"Ray did not start: {in_a_line(error)} (all of it: {logs / 'failure.txt'})") from error
    try:
        yield
    finally:
        ray.shutdown()


def _connect(config: Config, mark: str, logs: Path) -> None:
    runtime_env = {"env_vars": {MARK: mark}}
    namespace = f"baton-{config.run.name}-{mark}"
    if os.environ.get("RAY_ADDRESS"):
        start_guardian(mark)
        ray.init(namespace=namespace, runtime_env=runtime_env, log_to_driver=False, logging_level="error")
    else:
        folder = Path(tempfile.mkdtemp(prefix="baton-"))
        start_guardian(mark, folder, logs)
        ray.init(
            address="local",
            namespace=namespace,
            num_cpus=max(os.cpu_count() or 1, needed_cpus(config)),
            include_dashboard=False,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(folder),
        )


def needed_cpus(config: Config) -> int:
    """Ray CPUs that the run's actors take together."""
    return config.trainer.ranks + config.generator.engines


@dataclass(frozen=True)
class Cluster:
    """The run's actors."""

    hub: Any
    buffer: Any
    generators: tuple[Any, ...]
    trainer: TrainerGroup


def place_actors(config: Config, prepared: Prepared, journal: Path) -> Cluster:
    """Create every actor of the run; they load models and join each other when they are told to start."""
    config_json = config.model_dump_json()
    # Prometheus looks for the hub where the driver runs, also after a restart.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    hub = (
        ray.remote(MetricsHub)
        .options(name=HUB, num_cpus=0, max_restarts=-1, scheduling_strategy=here)
        .remote(config_json)
    )
    buffer = (
        ray.remote(BufferActor)
        .options(name=BUFFER, num_cpus=0, max_concurrency=1000, max_restarts=-1, max_task_retries=-1)
        .remote(config_json, prepared.vocab_size, str(prepared.tasks_file), str(journal), HUB)
    )
    gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
    generators = tuple(
        ray.remote(Generator)
        .options(
            name=f"generator-{i}",
            num_cpus=1,
            num_gpus=gpus * config.generator.tensor_parallel_size,
            max_concurrency=1000,
            max_restarts=-1,
            runtime_env={"env_vars": engine_env(config)},
        )
        .remote(f"generator-{i}", config_json, str(prepared.model_folder), str(prepared.tasks_file), BUFFER, HUB)
        for i in range(config.generator.engines)
    )
    ranks = [
        ray.remote(TrainerRank)
        .options(
            name=f"trainer-{i}",
            num_cpus=1,
            num_gpus=gpus,
            accelerator_type=config.trainer.accelerator,
            max_restarts=-1,
        )
        .remote(config_json, i)
        for i in range(config.trainer.ranks)
    ]
    return Cluster(hub, buffer, generators, TrainerGroup(config, ranks))
