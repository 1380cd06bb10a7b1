"""The metrics hub's actor, which dies while a run starts."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from actors.calls import call, started
from actors.observe.metrics_hub import MetricsHub
from service.config import Config, MetricsConfig
from service.run.folder import read_address

pytestmark = [pytest.mark.slow, pytest.mark.full]


class DyingHub(MetricsHub):
    """Dies at its first start, as by kill -9."""

    def __init__(self, config_json: str, folder: str) -> None:
        super().__init__(config_json, folder)
        self._died = Path(folder) / "died"

    async def start(self) -> str:
        if not self._died.exists():
            self._died.touch()
            os._exit(1)
        return await super().start()


@pytest.mark.usefixtures("local_ray")
def test_a_hub_that_dies_while_the_run_starts_is_started_again(tmp_path: Path) -> None:
    import ray

    config = Config(metrics=MetricsConfig(port=0))
    hub = ray.remote(DyingHub).options(num_cpus=0, max_restarts=-1).remote(config.model_dump_json(), str(tmp_path))
    assert asyncio.run(started(partial(call, hub.start, who="the hub"), within=60)) == read_address(tmp_path)
    ray.kill(hub)


@pytest.mark.usefixtures("local_ray")
def test_a_hub_that_dies_again_and_again_ends_the_start(tmp_path: Path) -> None:
    import ray
    import ray.exceptions

    hub = (
        ray.remote(DyingHub)
        .options(num_cpus=0)
        .remote(Config.model_validate({"metrics": {"port": 0}}).model_dump_json(), str(tmp_path))
    )
    with pytest.raises(ray.exceptions.RayActorError):
        asyncio.run(started(partial(call, hub.start, who="the hub"), tries=2))
